"""Directories of torch's DCP: read equal to what torch saved, and no name in their pickles is ever looked up."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from meshwright.checkpoint.bridges.converting import convert
from meshwright.checkpoint.bridges.dcp import DcpWeights
from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.errors import CheckpointError
from unit.checkpoint.made import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path, state: dict[str, Any]) -> Path:
    torch_dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def whole(weights: DcpWeights, name: str) -> torch.Tensor:
    (tensor,) = weights.pieces(name)
    return tensor


EVERY_TYPE = {
    f"{dtype}.{len(shape)}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, dtype))
    for dtype in ITEM_BYTES
    for shape in ((4, 3), (), (0, 2))
}


def test_what_torch_saved_is_imported_with_the_same_bits(tmp_path: Path) -> None:
    full = {**EVERY_TYPE, "transposed": torch.randn(5, 3).t(), "expanded": torch.ones(1, 3).expand(4, 3)}
    save(tmp_path / "dcp", dict(full))
    convert(tmp_path / "dcp", tmp_path / "own", allow_pickle=True)
    with OpenCheckpoint(tmp_path / "own" / "step-00000000") as snapshot:
        snapshot.check()
        assert snapshot.manifest.tensors.keys() == {f"model/{name}" for name in full}
        assert [name for name in full if not same_bits(snapshot.read(f"model/{name}"), full[name])] == []


def test_the_model_is_found_under_its_key_and_the_rest_is_said(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "dcp", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5})
    with DcpWeights(tmp_path / "dcp", allow_pickle=True) as weights:
        assert weights.tensors.keys() == model.state_dict().keys()
        assert all(torch.equal(whole(weights, name), tensor) for name, tensor in model.state_dict().items())
        assert "1 of step" in weights.notes[0]
        assert "of optimizer" in weights.notes[0]


def test_a_prefix_says_which_is_the_model(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"app": {"net": {"w": torch.ones(2)}, "lr": torch.ones(())}})
    with pytest.raises(CheckpointError, match="keys: 'app'; --prefix says"):
        DcpWeights(tmp_path / "dcp", allow_pickle=True)
    with DcpWeights(tmp_path / "dcp", allow_pickle=True, prefix="app.net.") as weights:
        assert list(weights.tensors) == ["w"]


def test_names_that_begin_with_model_are_kept_where_the_model_itself_was_saved(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"model.embed": torch.ones(2), "lm_head": torch.ones(3)})
    with DcpWeights(tmp_path / "dcp", allow_pickle=True) as weights:
        assert list(weights.tensors) == ["model.embed", "lm_head"]


# -- more than one rank's chunks, written as torch writes them -----------------------------------------------------------------


def write_chunks(path: Path, full: torch.Tensor, boxes: list[tuple[tuple[int, int], ...]], **changes: Any) -> Path:
    """Write a directory in which one tensor lies in boxes, each as a rank would save it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    path.mkdir()
    chunks, places = [], {}
    data = io.BytesIO()
    for box in boxes:
        begin = data.tell()
        entry = io.BytesIO()
        torch.save(full[tuple(slice(*pair) for pair in box)].clone(), entry)
        data.write(entry.getvalue())
        offsets = torch.Size([start for start, _ in box])
        chunks.append(ChunkStorageMetadata(offsets, torch.Size([stop - start for start, stop in box])))
        places[MetadataIndex("w", offsets)] = _StorageInfo(
            changes.get("file", "__0_0.distcp"), changes.get("begin", begin), changes.get("length", data.tell() - begin)
        )
    (path / "__0_0.distcp").write_bytes(data.getvalue())
    described = TensorStorageMetadata(
        TensorProperties(changes.get("dtype", full.dtype)), changes.get("size", full.shape), chunks
    )
    with (path / ".metadata").open("wb") as file:
        pickle.dump(Metadata({"w": described}, storage_data=places), file)
    return path


FULL = torch.arange(24.0).reshape(4, 6)
BOXES = {
    "rows": [((0, 3), (0, 6)), ((3, 4), (0, 6))],
    "columns": [((0, 4), (0, 2)), ((0, 4), (2, 6))],
    "a grid": [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6))],
    "uneven, one empty": [((0, 4), (0, 6)), ((4, 4), (0, 6))],
}


@pytest.mark.parametrize("boxes", BOXES.values(), ids=BOXES)
def test_chunks_of_many_ranks_are_put_together(tmp_path: Path, boxes: Any) -> None:
    with DcpWeights(write_chunks(tmp_path / "dcp", FULL, boxes), allow_pickle=True) as weights:
        assert torch.equal(whole(weights, "w"), FULL)


@pytest.mark.parametrize(
    ("boxes", "changes", "said"),
    [
        ([((0, 3), (0, 6))], {}, "do not hold each of its 24 entries once"),
        ([((0, 3), (0, 6)), ((2, 4), (0, 3))], {}, "do not hold each of its 24 entries once"),
        ([((0, 4), (0, 6))], {"size": torch.Size([4, 7])}, "do not hold each of its 28"),
        ([((0, 4), (0, 6))], {"size": torch.Size([24])}, "another number of dims"),
        ([((0, 4), (0, 6))], {"file": "../__0_0.distcp"}, "rule: a file in the same directory"),
        ([((0, 4), (0, 6))], {"file": "/etc/passwd"}, "rule: a file in the same directory"),
        ([((0, 4), (0, 6))], {"file": "none.distcp"}, r"none\.distcp is missing"),
        ([((0, 4), (0, 6))], {"begin": -1}, "no tuple of whole numbers"),
        ([((0, 4), (0, 6))], {"begin": 10**6}, "has an entry that ends at"),
        (BOXES["rows"], {"begin": 0}, "two entries overlap"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, boxes: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        DcpWeights(write_chunks(tmp_path / "dcp", FULL, boxes, **changes), allow_pickle=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"begin": 3}, "no archive of a tensor"),
        ({"length": 60}, "no archive of a tensor"),
        ({"size": torch.Size([6, 4])}, "do not hold|says"),
    ],
)
def test_an_entry_that_is_not_what_the_index_says_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = write_chunks(tmp_path / "dcp", FULL, [((0, 4), (0, 6))], **changes)
    if "begin" in changes:
        (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes() + b"123")
    with pytest.raises(CheckpointError, match=said):
        whole(DcpWeights(path, allow_pickle=True), "w")


def test_flipped_bits_of_the_numbers_are_found(tmp_path: Path) -> None:
    path = write_chunks(tmp_path / "dcp", FULL, [((0, 4), (0, 6))])
    data = (path / "__0_0.distcp").read_bytes()
    begin = data.index(FULL.numpy().tobytes())
    for place in range(begin, begin + FULL.nbytes, 7):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        (path / "__0_0.distcp").write_bytes(flipped)
        with pytest.raises(CheckpointError, match="are damaged: Bad CRC-32"):
            whole(DcpWeights(path, allow_pickle=True), "w")


def test_truncations_and_flips_never_give_other_numbers(tmp_path: Path) -> None:
    path = write_chunks(tmp_path / "dcp", FULL, BOXES["columns"])
    num_read = 0
    for file in (path / "__0_0.distcp", path / ".metadata"):
        data = file.read_bytes()
        damaged = [data[:size] for size in range(0, len(data), 211)]
        damaged += [data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :] for at in range(0, len(data), 29)]
        for contents in damaged:
            file.write_bytes(contents)
            try:
                with DcpWeights(path, allow_pickle=True) as weights:
                    found = {name: whole(weights, name) for name in weights.tensors}
            except CheckpointError:
                continue
            # Names, and fields that are not read, have no check sum there.
            num_read += 1
            assert len(found) <= 1
            assert all(torch.equal(tensor, FULL) for tensor in found.values())
        file.write_bytes(data)
    assert num_read > 10


def test_a_compressed_entry_is_refused(tmp_path: Path) -> None:
    path = write_chunks(tmp_path / "dcp", FULL, [((0, 4), (0, 6))])
    packed = io.BytesIO()
    with zipfile.ZipFile(path / "__0_0.distcp") as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    size = (path / "__0_0.distcp").stat().st_size
    (path / "__0_0.distcp").write_bytes(b"\0" * (size - len(packed.getvalue())) + packed.getvalue())
    with pytest.raises(CheckpointError, match=r"compressed records|no archive"):
        whole(DcpWeights(path, allow_pickle=True), "w")


# -- pickles --------------------------------------------------------------------------------------------------------------


class Calls:
    """What a pickle calls when it is read by pickle.load."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> Any:
        return self._reduced


def test_pickles_are_not_read_unless_asked_for(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="can run code") as caught:
        convert(tmp_path / "dcp", tmp_path / "own")
    assert "--allow-pickle" in (caught.value.fix or "")
    assert not (tmp_path / "own").exists()


_found: list[str] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _found is not None and (
        event.startswith(("pickle.", "os.", "subprocess.", "exec", "import")) or event == "open"
    ):
        _found.append(f"{event} {args[0] if args else ''}")


HARMFUL: dict[str, Callable[[Path], Any]] = {
    "a system call": lambda path: Calls(os.system, f"touch {path}"),
    "a file": lambda path: Calls(open, str(path), "w"),
    "eval": lambda path: Calls(eval, f"open({str(path)!r}, 'w')"),
    "getattr": lambda path: Calls(getattr, Path, "cwd"),
    "a class of torch": lambda path: Calls(torch.storage.UntypedStorage, 5),
    "torch.load": lambda path: Calls(torch.load, str(path)),
    "a module": lambda path: Calls(__import__, "this"),
}


@pytest.mark.parametrize("make", HARMFUL.values(), ids=HARMFUL)
@pytest.mark.parametrize("place", ["index", "planner", "entry"])
def test_what_a_pickle_would_call_is_refused_and_not_called(
    tmp_path: Path, make: Callable[[Path], Any], place: str
) -> None:
    global _found
    victim = tmp_path / "victim"
    path = write_chunks(tmp_path / "dcp", FULL, [((0, 4), (0, 6))])
    harm = make(victim)
    if place == "entry":
        with zipfile.ZipFile(path / "__0_0.distcp") as old:
            records = {info.filename: old.read(info) for info in old.infolist()}
        with zipfile.ZipFile(path / "__0_0.distcp", "w") as new:
            for name, data in records.items():
                new.writestr(name, pickle.dumps(harm) if name.endswith("data.pkl") else data)
        index = pickle.loads((path / ".metadata").read_bytes())
        for info in index.storage_data.values():
            info.length = (path / "__0_0.distcp").stat().st_size
        (path / ".metadata").write_bytes(pickle.dumps(index))
    elif place == "index":
        (path / ".metadata").write_bytes(pickle.dumps(harm))
    else:
        index = pickle.loads((path / ".metadata").read_bytes())
        index.planner_data = {"w": harm}
        (path / ".metadata").write_bytes(pickle.dumps(index))
    b"x".decode("cp437")  # zipfile reads names with it, and the first use imports it
    sys.addaudithook(_hook)
    _found = []
    try:
        with pytest.raises(CheckpointError, match="dcp"):
            whole(DcpWeights(path, allow_pickle=True), "w")
    finally:
        found, _found = _found, None
    assert not victim.exists()
    assert any(event.startswith("open") for event in found)  # the hook hears
    assert [event for event in found if not event.startswith(f"open {path}")] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\x96\xff\xff\xff\xff\x1f\x00\x00\x00", "BYTEARRAY8|expected"),  # 128 GiB of bytes that are not there
        (b"\x8e\xff\xff\xff\xff\x1f\x00\x00\x00", "BINBYTES8|expected"),
        (b"Nr\xff\xff\xff\x7f", "place 2147483647 after 0 others"),  # a table of 32 GiB
        (b"\x82\x01", "EXT1"),
        (b"cos\nsystem\n", "'os.system'"),
        (b"(cos\nsystem\no", "OBJ"),
        (b"P1\n", "PERSID"),
    ],
)
def test_opcodes_that_dcp_does_not_write_are_refused(tmp_path: Path, body: bytes, said: str) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x05" + body + b".")
    with pytest.raises(CheckpointError, match=said):
        DcpWeights(tmp_path / "dcp", allow_pickle=True)


def test_a_pickle_that_changes_what_it_names_changes_nothing(tmp_path: Path) -> None:
    # BUILD with a pair sets attributes of any object, a class that the pickle names included.
    name = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n"
    data = name + b"N}\x8c\x07versionK\x05s\x86b."
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    pickle.loads(data)  # that is what pickle.load would do
    assert Metadata.version == 5
    Metadata.version = None
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        DcpWeights(tmp_path / "dcp", allow_pickle=True)
    assert Metadata.version is None
