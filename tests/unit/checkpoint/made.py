"""Checkpoints, made through the store as ranks would make them, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.manifest import Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.tensor_files import TensorFile, dtype_name
from meshwright.layout import ShardLayout, even_ranges


def save_tensors(
    root: Path,
    full: Mapping[str, torch.Tensor],
    *,
    step: int = 1,
    aliases: Mapping[str, str] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Save as two ranks would: tensors of two dims cut by columns, of one dim in two flat pieces, the rest on the first."""
    draft = Store(root).begin(step)
    held: list[list[tuple[str, ShardLayout, torch.Tensor]]] = [[], []]
    for name, tensor in full.items():
        shape = tuple(tensor.shape)
        for rank in (0, 1):
            if len(shape) == 2 and shape[1] > 1:
                start, stop = even_ranges(shape[1], 2)[rank]
                held[rank].append(
                    (name, ShardLayout(shape=shape, dim=1, ranges=((start, stop),)), tensor[:, start:stop])
                )
            elif len(shape) == 1 and shape[0] > 1:
                start, stop = even_ranges(shape[0], 2)[rank]
                held[rank].append((name, ShardLayout(shape=shape, flat=(start, stop)), tensor[start:stop]))
            elif not rank:
                held[rank].append((name, ShardLayout(shape=shape), tensor))
    parts: dict[str, list[StoredPart]] = {}
    written = []
    for rank, own in enumerate(held):
        file = TensorFile([(name, tensor) for name, _, tensor in own])
        written.append(draft.write(f"rank-{rank:05d}.safetensors", file))
        for (name, layout, _), offset in zip(own, file.offsets, strict=True):
            parts.setdefault(name, []).append(StoredPart(rank, offset, layout))
    tensors = {
        name: TensorEntry(dtype_name(full[name].dtype), tuple(full[name].shape), tuple(own))
        for name, own in parts.items()
    }
    manifest = Manifest(
        step=step,
        epoch=draft.epoch,
        plan="tp=2",
        files=tuple(written),
        tensors=tensors,
        aliases=aliases or {},
        state=state or {},
    )
    return draft.commit(manifest)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have one type, one shape and the same bytes; NaN and -0.0 count as they are stored."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    sides = [side.contiguous().reshape(-1).view(torch.uint8) for side in (left, right)]
    return torch.equal(*sides)


def tensors_of(step: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by each of its names, after its files were checked."""
    with OpenCheckpoint(step) as snapshot:
        snapshot.check()
        return {name: snapshot.read(name) for name in [*snapshot.manifest.tensors, *snapshot.manifest.aliases]}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail unless both have the same names, and each name's tensors the same bits."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []
