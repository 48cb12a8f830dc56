"""Open checkpoints: a part of a tensor is read from any other parts of it, and nothing else is opened, followed or executed."""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.checkpoint.test_runs import layouts, taken

from meshwright.checkpoint import open_checkpoint
from meshwright.checkpoint.manifest import ITEM_BYTES, Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.tensor_files import TensorFile
from meshwright.errors import CheckpointError
from meshwright.layout import ShardLayout


def full_tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return a tensor whose bytes are all different, as far as its type goes."""
    size = math.prod(shape) * ITEM_BYTES[dtype]
    source = torch.Generator().manual_seed(size)
    data = torch.randint(0, 2 if dtype == "bool" else 256, (size,), dtype=torch.uint8, generator=source)
    return data.view(getattr(torch, dtype)).view(shape) if size else torch.empty(shape, dtype=getattr(torch, dtype))


def bits(tensor: torch.Tensor) -> bytes:
    return own_copy(tensor).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the entries, flattened; a single one has stride 1, too, as it need not have by torch's rules."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))


def part_of(tensor: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Return what `taken` does, for every type: torch cannot index all of them."""
    places = taken(torch.arange(tensor.numel()).reshape(tensor.shape), layout)
    if not places.numel():
        return tensor.new_empty(places.shape)
    rows = own_copy(tensor).view(torch.uint8).reshape(tensor.numel(), -1)
    return own_copy(rows[places.reshape(-1)]).view(tensor.dtype).reshape(places.shape)


def save(
    root: Path, tensor: torch.Tensor, stored: list[ShardLayout], source: random.Random, order: tuple[int, ...] = ()
) -> Path:
    """Save one tensor as these parts, dealt out to files at random, between others."""
    draft = Store(root).begin(1)
    world = source.randint(1, 3)
    dealt: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(world)]
    places = []
    for number, layout in enumerate(stored):
        rank = source.randrange(world)
        dealt[rank].append((f"before {number}", torch.arange(source.randint(0, 9), dtype=torch.uint8)))
        places.append((rank, len(dealt[rank])))
        dealt[rank].append((f"part {number}", part_of(tensor, layout)))
    files = [TensorFile(named) for named in dealt]
    written = [draft.write(f"rank-{rank:05d}.safetensors", file) for rank, file in enumerate(files)]
    parts = tuple(
        StoredPart(rank, files[rank].offsets[place], layout)
        for (rank, place), layout in zip(places, stored, strict=True)
    )
    entry = TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), parts, order)
    return draft.commit(
        Manifest(step=1, epoch=draft.epoch, plan="dp=3", files=tuple(written), tensors={"model/w": entry})
    )


shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8]), max_size=4).map(tuple)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes,
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    source=st.randoms(use_true_random=False),
    gap=st.sampled_from([0, 1, 8, 2**14]),
)
def test_any_part_is_read_from_any_others(shape: tuple[int, ...], dtype: str, source: random.Random, gap: int) -> None:
    tensor = full_tensor(shape, dtype)
    # Stored in another order of the dims, as memory in channels_last is; and wanted in a third.
    order, wanted_order = (tuple(source.sample(range(len(shape)), len(shape))) for _ in range(2))
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(open_checkpoint, "_GAP_BYTES", gap)
        patch.setattr(open_checkpoint, "_SPAN_BYTES", source.choice([1, 20, 2**20]))
        stored = tensor.permute(order).contiguous()
        path = save(Path(directory), stored, layouts(tuple(stored.shape), source), source, order)
        with OpenCheckpoint(path) as snapshot:
            snapshot.check()
            assert snapshot.manifest.tensors["model/w"].full_shape == shape
            assert bits(snapshot.read("model/w")) == bits(tensor)
            for each in (order, wanted_order):
                turned = tensor.permute(each).contiguous()
                for wanted in layouts(tuple(turned.shape), source):
                    found = snapshot.read("model/w", wanted, each)
                    assert tuple(found.shape) == wanted.local_shape
                    assert bits(found) == bits(part_of(turned, wanted))


def test_a_part_of_another_shape_is_refused_in_any_order(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    path = save(tmp_path, tensor, [ShardLayout(shape=(3, 4))], random.Random(0))
    with OpenCheckpoint(path) as snapshot:
        for order in ((), (0, 1), (1, 0)):
            shape = (4, 3) if order != (1, 0) else (3, 4)
            with pytest.raises(CheckpointError, match="has shape"):
                snapshot.read("model/w", ShardLayout(shape=shape, flat=(0, 6)), order)


def test_one_entry_of_a_strided_tensor_is_saved(tmp_path: Path) -> None:
    for one in (
        torch.arange(8.0)[::2][1:2],
        torch.arange(8.0).view(2, 4)[:1, 3:],
        torch.arange(6.0).view(3, 2).T[1:, 1:2],
    ):
        path = save(tmp_path, one, [ShardLayout.whole(one.shape)], random.Random(0))
        file = TensorFile([("w", one)])
        assert b"".join(file)[file.offsets[0] :] == bits(one)
        with OpenCheckpoint(path) as snapshot:
            assert torch.equal(snapshot.read("model/w"), one)


def test_many_small_runs_are_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(4096.0).reshape(512, 8)
    cut = [ShardLayout(shape=(512, 8), dim=1, ranges=(part,)) for part in ((0, 3), (3, 8))]
    path = save(tmp_path, tensor, cut, random.Random(0))
    reads: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (reads.append(1), preadv(*args))[1])
    with OpenCheckpoint(path) as snapshot:
        reads.clear()
        assert torch.equal(snapshot.read("model/w"), tensor)
    assert len(reads) == 2  # one for each part, not one for each row


def test_a_size_of_zero_costs_nothing_whatever_stands_beside_it(tmp_path: Path) -> None:
    shape = (2**40, 0)
    cut = [ShardLayout(shape=shape, dim=1, ranges=())]
    path = save(tmp_path, torch.empty(shape), cut, random.Random(0))
    with OpenCheckpoint(path) as snapshot:
        assert tuple(snapshot.read("model/w", cut[0]).shape) == shape


# -- what is opened ---------------------------------------------------------------------------------------------------------

_watchers: list[Callable[[str, tuple[Any, ...]], None]] = []
_FORBIDDEN = (
    *(
        "pickle.",
        "marshal.",
        "import",
        "compile",
        "exec",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
    ),
    *("subprocess.", "socket.", "ctypes.dlopen", "code.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link"),
    *("os.symlink", "os.truncate", "os.chmod", "os.chown", "shutil.", "tempfile.", "urllib.", "http.", "ftplib."),
)


@pytest.fixture(scope="module")
def audited() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """Events of the interpreter's audit hook, which can never be removed; it does nothing after this file."""
    events: list[tuple[str, tuple[Any, ...]]] = []
    sys.addaudithook(lambda event, args: [watch(event, args) for watch in _watchers] and None)
    yield events
    _watchers.clear()


def test_reading_opens_nothing_else_and_executes_nothing(tmp_path: Path, audited: list[tuple[str, Any]]) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    rows = [ShardLayout(shape=(3, 4), dim=0, ranges=(part,)) for part in ((0, 2), (2, 3))]
    store = Store(tmp_path)
    path = save(tmp_path, tensor, rows, random.Random(0))
    OpenCheckpoint(path).close()  # what is imported or compiled the first time
    _watchers.append(lambda event, args: audited.append((event, args)))
    try:
        with store.newest()[0] as snapshot:
            found = snapshot.read("model/w", ShardLayout(shape=(3, 4), dim=1, ranges=((1, 3),)))
            turned = snapshot.read("model/w", None, (1, 0))
    finally:
        _watchers.clear()
    assert torch.equal(found, tensor[:, 1:3])
    assert torch.equal(turned, tensor.T)
    assert [event for event in audited if event[0].startswith(_FORBIDDEN)] == []
    opened = [args for event, args in audited if event == "open"]
    names = {"manifest.json", *(file.name for file in snapshot.manifest.files)}
    names |= {f"{file.name}.blocks" for file in snapshot.manifest.files}
    assert {Path(file).name for file, _, _ in opened} == names
    for file, _, flags in opened:
        assert Path(file).parent == path
        assert flags & os.O_NOFOLLOW
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    assert [Path(args[0]) for event, args in audited if event == "os.scandir"] == [tmp_path]
