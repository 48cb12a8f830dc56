"""The store: saves that are whole or not there, at every instant of a kill; damage that is found; parts that are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.manifest import Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.tensor_files import TensorFile, dtype_name
from meshwright.errors import CheckpointError, StorageError
from meshwright.layout import ShardLayout, even_ranges


def tensors(step: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(12, 5, generator=source),
        "model/half": torch.randn(7, generator=source).to(torch.bfloat16),
        "model/mask": torch.rand(3, generator=source) < 0.5,
        "model/count": torch.tensor(step),
        "model/empty": torch.zeros(0, 4),
        "optimizer/weight/moment": torch.randn(12, 5, generator=source, dtype=torch.float64),
    }


def save(store: Store, step: int) -> Path:
    """Save as two ranks would: weights cut by rows, the flattened moment in two pieces, the rest on the first."""
    draft, full = store.begin(step), tensors(step)
    rows = [ShardLayout(shape=(12, 5), dim=0, ranges=(part,)) for part in even_ranges(12, 2)]
    flat = [ShardLayout(shape=(12, 5), flat=part) for part in even_ranges(60, 2)]
    held: list[list[tuple[str, ShardLayout, torch.Tensor]]] = [[], []]
    for rank in (0, 1):
        (start, stop), (first, last) = rows[rank].ranges[0], flat[rank].flat or (0, 0)
        held[rank].append(("model/weight", rows[rank], full["model/weight"][start:stop]))
        moment = full["optimizer/weight/moment"].reshape(-1)[first:last]
        held[rank].append(("optimizer/weight/moment", flat[rank], moment))
    for name in ("model/half", "model/mask", "model/count", "model/empty"):
        held[0].append((name, ShardLayout(shape=tuple(full[name].shape)), full[name]))
    entries: dict[str, list[StoredPart]] = {}
    written = []
    for rank, own in enumerate(held):
        file = TensorFile([(name, tensor) for name, _, tensor in own])
        written.append(draft.write(f"rank-{rank:05d}.safetensors", file))
        for (name, layout, _), offset in zip(own, file.offsets, strict=True):
            entries.setdefault(name, []).append(StoredPart(rank, offset, layout))
    named = {
        name: TensorEntry(dtype_name(full[name].dtype), tuple(full[name].shape), tuple(parts))
        for name, parts in entries.items()
    }
    manifest = Manifest(
        step=step,
        epoch=draft.epoch,
        plan="dp=2,zero=1",
        files=tuple(written),
        tensors=named,
        aliases={"model/tied": "model/weight"},
        state={"loader": {"epoch": 1, "samples": 640}},
    )
    return draft.commit(manifest)


def assert_holds(snapshot: OpenCheckpoint, step: int) -> None:
    snapshot.check()
    assert snapshot.manifest.step == step
    for name, tensor in tensors(step).items():
        assert torch.equal(snapshot.read(name), tensor), name


def test_what_is_saved_is_read_whole_and_in_any_part(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    path = save(store, 12)
    assert path.name == "step-00000012"
    with OpenCheckpoint(path) as snapshot:
        assert_holds(snapshot, 12)
        weight = tensors(12)["model/weight"]
        wanted = ShardLayout(shape=(12, 5), dim=1, ranges=((3, 5), (0, 1)))
        assert torch.equal(snapshot.read("model/tied", wanted), weight[:, [3, 4, 0]])
        assert snapshot.manifest.state["loader"] == {"epoch": 1, "samples": 640}
        with pytest.raises(CheckpointError, match="no tensor 'model/none'"):
            snapshot.read("model/none")
        with pytest.raises(CheckpointError, match=r"shape \[12, 5\].*has \[5, 12\]"):
            snapshot.read("model/weight", ShardLayout(shape=(5, 12)))


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    found = load_file(save(Store(tmp_path), 3) / "rank-00000.safetensors")
    full = tensors(3)
    assert torch.equal(found["model/half"], full["model/half"])
    assert torch.equal(found["model/mask"], full["model/mask"])
    assert torch.equal(found["model/weight"], full["model/weight"][:6])


def test_a_step_that_is_saved_again_gets_a_name_of_its_own_and_is_the_newest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = [save(store, step).name for step in (2, 10, 2, 10)]
    assert names == ["step-00000002", "step-00000010", "step-00000002.2", "step-00000010.2"]
    assert [saved.path.name for saved in store.saved()] == [names[3], names[1], names[2], names[0]]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_a_file_under_a_checkpoint_s_name_is_left_alone(tmp_path: Path, kind: str) -> None:
    store = Store(tmp_path)
    save(store, 4)
    taken = tmp_path / "step-00000005"
    taken.symlink_to("step-00000004") if kind == "link" else taken.write_text("mine")
    path = save(store, 5)  # it could not get its name: the end of a run was not saved
    assert (path.name != taken.name, taken.is_symlink()) == (True, kind == "link")
    with store.newest()[0] as found:
        assert found.manifest.step == 5


def test_retention_keeps_the_newest_and_those_that_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in range(1, 7):
        save(store, step)
    (tmp_path / "step-notes.txt").write_text("the user's")
    store.retain(2, also=[1])
    assert [saved.step for saved in store.saved()] == [6, 5, 1]
    store.retain(0)
    assert [saved.step for saved in store.saved()] == [6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-notes.txt"]


def test_a_checkpoint_under_the_name_of_another_step_is_skipped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, new = save(store, 3), save(store, 5)
    shutil.copytree(old, tmp_path / "copy")
    shutil.rmtree(new)
    (tmp_path / "copy").rename(new)
    with store.newest()[0] as snapshot:
        assert snapshot.path == old
    assert "manifest.json is of step-00000003" in store.newest()[1][0][1]


def test_retention_counts_only_what_can_be_opened(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in range(1, 6):
        save(store, step)
    for step in (4, 5):
        os.truncate(tmp_path / f"step-{step:08d}" / "rank-00000.safetensors", 9)
    store.retain(2)
    assert [saved.step for saved in store.saved()] == [5, 4, 3, 2]
    with store.newest()[0] as snapshot:
        assert_holds(snapshot, 3)
    for step in (2, 3):
        (tmp_path / f"step-{step:08d}" / "manifest.json").write_bytes(b"{}")
    assert store.retain(1) == []  # nothing is sound: perhaps something can be rescued


def test_what_is_deleted_while_a_reader_looks_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    save(store, 1)
    looks: list[int] = []
    own = Store.saved

    def meanwhile(self: Store) -> list[Any]:
        found = own(self)
        if not looks:  # after the reader has seen step 1, the writer saves step 2 and deletes step 1
            looks.append(1)
            monkeypatch.setattr(Store, "saved", own)
            save(store, 2)
            store.retain(1)
            monkeypatch.setattr(Store, "saved", meanwhile)
        return found

    monkeypatch.setattr(Store, "saved", meanwhile)
    snapshot, skipped = store.newest()
    assert skipped == []
    with snapshot:
        assert_holds(snapshot, 2)
        store.retain(1)
        save(store, 3)
        store.retain(1)
        assert_holds(snapshot, 2)  # it is deleted, and still open


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_step_that_has_no_name_is_refused_before_anything_is_written(tmp_path: Path, step: int) -> None:
    with pytest.raises(CheckpointError, match="step is"):
        Store(tmp_path / "new").begin(step)
    assert not (tmp_path / "new").exists()


def test_the_names_of_new_directories_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))[1]
    )
    save(Store(tmp_path / "runs" / "a" / "checkpoints"), 1)
    for path in (tmp_path, tmp_path / "runs", tmp_path / "runs" / "a", tmp_path / "runs" / "a" / "checkpoints"):
        assert str(path) in synced


def test_a_note_may_be_the_last_thing_before_the_directory_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The writer that commits runs in another process: it may go on as soon as the note is there.
    draft = Store(tmp_path).begin(5)
    rename = os.rename

    def commit_at_once(old: Path, new: Path) -> None:
        rename(old, new)
        assert draft.read_note(1) == ["row"]
        rename(draft.path, tmp_path / "step-00000005")

    monkeypatch.setattr(os, "rename", commit_at_once)
    draft.leave_note(1, ["row"])
    assert (tmp_path / "step-00000005" / "note-00001.json").exists()


def test_odd_names_and_many_foreign_files_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"a \xff\n'\"$(x) -rf") / "-" / ("b" * 200)
    store = Store(root)
    save(store, 1)
    foreign = [
        *(f"foreign {number}" for number in range(2000)),
        "step-1",
        "step-00000001.1",
        "step-00000002\n",
        "draft",
    ]
    for name in foreign:
        (root / name).write_bytes(b"the user's")
    (root / "step-00000009").symlink_to(root / "step-00000001")
    (root / "step-00000007").write_bytes(b"")
    save(store, 2)
    assert [saved.step for saved in store.saved()] == [2, 1]
    with store.newest()[0] as snapshot:
        assert_holds(snapshot, 2)
    store.retain(1)
    store.clear_leftovers()
    assert {path.name for path in root.iterdir()} == {*foreign, "step-00000009", "step-00000007", "step-00000002"}


# -- kills ----------------------------------------------------------------------------------------------------------------

_OPERATIONS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir")


def die_at(number: int, work: Callable[[], Any]) -> int:
    """Run work in a child that is killed before its n-th operation on files; return 0 if it came to its end first."""
    child = os.fork()
    if not child:
        left = [number]

        def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return operation(*args, **kwargs)

            return run

        for name in _OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("scenario", ["first", "another step", "the same step", "with retention"])
def test_at_every_instant_of_a_kill_there_is_the_old_or_the_new(tmp_path: Path, scenario: str) -> None:
    step = {"first": 5, "another step": 5, "the same step": 4, "with retention": 5}[scenario]

    def work() -> None:
        store = Store(tmp_path / "now")
        save(store, step)
        if scenario == "with retention":
            store.retain(1)

    base = tmp_path / "base"
    if scenario != "first":
        save(Store(base), 4)
    number = 0
    for number in range(1000):
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        if base.exists():
            shutil.copytree(base, tmp_path / "now")
        status = die_at(number, work)
        assert status in (0, 9)
        store = Store(tmp_path / "now")
        names = [saved.path.name for saved in store.saved()]
        if names:
            snapshot, skipped = store.newest()
            assert not skipped
            with snapshot:
                assert_holds(snapshot, snapshot.manifest.step)
        else:
            assert scenario == "first"
            assert status == 9
        save(store, 9)  # whatever has been left there, the next save is sound, and the leftovers go
        store.clear_leftovers()
        assert all(path.name.startswith("step-") for path in (tmp_path / "now").iterdir())
        assert store.newest()[0].manifest.step == 9
        if not status:
            break
    assert number > 20


# -- damage ---------------------------------------------------------------------------------------------------------------


def files_of(path: Path) -> Iterator[Path]:
    yield from sorted(path.iterdir())


def test_every_flipped_byte_and_every_truncation_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, path = save(store, 1), save(store, 2)
    for file in files_of(path):
        data = file.read_bytes()
        for place in range(len(data)):
            changed = bytearray(data)
            changed[place] ^= 1 << place % 8
            _assert_refused(path, file, bytes(changed))
        for size in {0, 1, len(data) // 2, len(data) - 1} - {len(data)}:
            _assert_refused(path, file, data[:size])
        _assert_refused(path, file, data + b"\0")
        file.write_bytes(data)
    snapshot, skipped = store.newest()
    assert (snapshot.path, skipped) == (path, [])
    next(files_of(path)).write_bytes(b"")
    snapshot, skipped = store.newest()
    assert snapshot.path == old
    assert [where for where, _ in skipped] == [path]


def _assert_refused(path: Path, file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises((CheckpointError, StorageError)) as caught, OpenCheckpoint(path) as snapshot:
        snapshot.check()
    assert file.name in caught.value.message or f"{file.name}.blocks" in caught.value.message


def test_files_of_another_checkpoint_links_and_pipes_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    other, path = save(store, 1), save(store, 2)
    file = path / "rank-00000.safetensors"
    data = file.read_bytes()
    shutil.copy(other / file.name, file)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged"), OpenCheckpoint(path) as snapshot:
        snapshot.check()
    file.unlink()
    file.symlink_to(other / file.name)
    with pytest.raises(StorageError, match=r"cannot read .*rank-00000"):
        OpenCheckpoint(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StorageError, match="no regular file"):
        OpenCheckpoint(path)
    file.unlink()
    with pytest.raises(StorageError, match="No such file"):
        OpenCheckpoint(path)
    file.write_bytes(data)
    OpenCheckpoint(path).close()


def test_shares_of_a_check_find_together_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.blocks.BLOCK_BYTES", 64)
    path = save(Store(tmp_path), 1)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    found = []
    with OpenCheckpoint(path) as snapshot:
        for share in range(3):
            try:
                snapshot.check(share, 3)
            except CheckpointError as error:
                found.append((share, error.message))
    assert [share for share, _ in found] == [0]  # byte 200 lies in the fourth block
    assert "bytes 192 to 256" in found[0][1]
