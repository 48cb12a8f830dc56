"""Models that branch on values of their batch: refused where samples decide for one another, else said in the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing
from meshwright.errors import ApplyError

WORD = "branches on values of its batch"


class Rounds(nn.Module):
    """Runs its layer as often as the sample that asks for most; a sample alone decides for itself only."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.layer = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        rounds = (x[:, 0] > 0).long() + 1
        for _ in range(int(rounds.max()) if self.reads else 1):
            x = torch.tanh(self.layer(x.clone()))
        return x


def _mean(outputs: Tensor, _: Any) -> Tensor:
    return outputs.square().mean()


def _sum(outputs: Tensor, _: Any) -> mw.Loss:
    return mw.Loss(outputs.square().sum(), len(outputs))


def _reasons(line: str, reads: bool, *, differ: bool = False, loss_fn: Any = _mean) -> str:
    torch.manual_seed(0)
    model = Rounds(reads=reads).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = mw.apply_plan(model, line, loss_fn=loss_fn, optimizer=optimizer)
    batch = torch.rand(4, 4, dtype=torch.float64) + 0.1  # all ask for two rounds
    if differ:
        batch[::2, 0] -= 2.0
    applied.step((batch, batch))
    return " ".join(applied.plan.reasons)


@pytest.mark.parametrize(("line", "ranks"), [("dp=2", 2), ("micro_batches=2", 1), ("pp=1,dp=2,zero=3", 2)])
def test_a_branch_is_told_where_the_batch_is_cut(line: str, ranks: int) -> None:
    assert all(WORD in found for found in testing.run_ranks(_reasons, ranks, line, True))
    assert not any(WORD in found for found in testing.run_ranks(_reasons, ranks, line, False))


def test_one_device_is_told_nothing() -> None:
    assert WORD not in _reasons("single", True)


def test_samples_that_decide_for_one_another_are_refused() -> None:
    with pytest.raises(ApplyError, match="samples decide for one another") as caught:
        _reasons("micro_batches=2", True, differ=True)
    assert "micro_batches=1, and batch=whole or dp=1" in (caught.value.fix or "")
    assert WORD not in _reasons("micro_batches=1", True, differ=True)
    assert WORD in _reasons("micro_batches=2", True, differ=True, loss_fn=_sum)
