"""Shards compared with the parameter that was cut, block by block: a wrong entry anywhere is found on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.apply.tensor import placement
from meshwright.apply.tensor.proof.threads import run_as_ranks
from meshwright.layout import ShardLayout
from meshwright.nn.shards import take_shard


def verdicts(whole: Tensor, shards: list[Tensor], layouts: list[ShardLayout]) -> list[bool]:
    """Return what each rank finds; ranks are threads."""
    found, errors = run_as_ranks(
        len(shards), lambda group: placement.is_in_place(whole, shards[group.group_rank], layouts, group)
    )
    assert not errors
    return [bool(verdict) for verdict in found]


CUTS = [(0, (7,)), (0, (4, 3)), (1, (5,)), (1, (3, 2)), (2, (2,))]


@pytest.mark.parametrize(("dim", "groups"), CUTS)
@pytest.mark.parametrize("block", [1, 20, 10**6])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_entry_is_compared(
    monkeypatch: pytest.MonkeyPatch, dim: int, groups: tuple[int, ...], block: int, num_ranks: int
) -> None:
    monkeypatch.setattr(placement, "_BLOCK", block)
    whole = torch.arange(70.0).view(7, 5, 2)
    layouts = [ShardLayout.cut(whole.shape, dim, groups, num_parts=num_ranks, part=part) for part in range(num_ranks)]
    shards = [take_shard(whole, layout) for layout in layouts]
    assert verdicts(whole, shards, layouts) == [True] * num_ranks
    for rank, shard in enumerate(shards):
        for entry in {0, shard.numel() // 2, shard.numel() - 1} if shard.numel() else ():
            wrong = [other.clone() for other in shards]
            wrong[rank].view(-1)[entry] = -1.0
            assert verdicts(whole, wrong, layouts) == [False] * num_ranks


def test_bits_count_and_not_values() -> None:
    whole = torch.tensor([[0.0], [torch.nan]])
    layouts = [ShardLayout.cut((2, 1), 0, (2,), num_parts=2, part=part) for part in range(2)]
    shards = [take_shard(whole, layout) for layout in layouts]
    assert verdicts(whole, shards, layouts) == [True, True]
    assert verdicts(whole, [-shards[0], shards[1]], layouts) == [False, False]
