"""Runs: any part of a tensor is put together from any other parts of it."""

from __future__ import annotations

import random

import pytest
import torch

from meshwright.checkpoint.runs import common_runs, runs_of
from meshwright.layout import ShardLayout, even_ranges


def taken(whole: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Return a part by what its layout says, entry by entry."""
    block = whole
    if layout.dim is not None:
        rows = [index for start, stop in layout.ranges for index in range(start, stop)]
        block = whole.index_select(layout.dim, torch.tensor(rows, dtype=torch.long))
    return block if layout.flat is None else block.reshape(-1)[layout.flat[0] : layout.flat[1]]


def layouts(shape: tuple[int, ...], source: random.Random) -> list[ShardLayout]:
    """Return layouts that hold a tensor once: whole, by ranges along a dim in any order, flattened, or both."""
    kind = source.choice(["whole", "cut", "flat", "both"]) if shape else "whole"
    found = [ShardLayout(shape=shape)]
    if kind in ("cut", "both"):
        dim, parts = source.randrange(len(shape)), source.randint(1, 3)
        pieces = list(even_ranges(shape[dim], 2 * parts))
        source.shuffle(pieces)
        found = [ShardLayout(shape=shape, dim=dim, ranges=tuple(pieces[part::parts])) for part in range(parts)]
    if kind in ("flat", "both"):
        parts = source.randint(1, 3)
        found = [each.replace(flat=flat) for each in found for flat in even_ranges(each.block_numel, parts)]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_every_part_is_put_together_from_all_others(seed: int) -> None:
    source = random.Random(seed)
    shape = tuple(source.randint(0 if source.random() < 0.1 else 1, 7) for _ in range(source.randint(0, 4)))
    whole = torch.arange(max(1, int(torch.Size(shape).numel())))[: torch.Size(shape).numel()].reshape(shape)
    stored = [(layout, taken(whole, layout).reshape(-1)) for layout in layouts(shape, source)]
    for wanted in layouts(shape, source):
        found, seen = torch.full((wanted.numel,), -1), 0
        for layout, part in stored:
            for theirs, mine, length in common_runs(runs_of(layout), runs_of(wanted)):
                found[mine : mine + length] = part[theirs : theirs + length]
                seen += length
        assert seen == wanted.numel  # each entry once
        assert torch.equal(found.reshape(wanted.local_shape), taken(whole, wanted).reshape(wanted.local_shape))


def test_neighbours_are_one_run() -> None:
    assert len(runs_of(ShardLayout(shape=(100, 4), dim=0, ranges=((0, 30), (30, 60))))) == 1
    assert len(runs_of(ShardLayout(shape=(100, 4), dim=1, ranges=((0, 4),)))) == 1
    assert not runs_of(ShardLayout(shape=(3, 0)))
