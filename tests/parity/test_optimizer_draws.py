"""Optimizers that draw random numbers: copies of a parameter stay alike on all ranks; where ranks hold parts they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing

WIDTH = 6


class Langevin(torch.optim.Optimizer):
    """Gradient descent with noise (SGLD)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1).add_(torch.randn_like(parameter), alpha=0.05)


def _build() -> nn.Module:
    first, last = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
    return nn.Sequential(first, nn.Tanh(), nn.Dropout(0.5), last).double()


def _train(line: str) -> tuple[list[Tensor], Tensor]:
    """Return the parameters after some steps, and what this rank draws next."""
    torch.manual_seed(100 + mw.current_world().rank)
    model = mw.apply_plan(_build, line, loss_fn=lambda out, batch: (out - batch[1]).square().mean(), optimizer=Langevin)
    source = torch.Generator().manual_seed(5)
    for _ in range(4):
        batch = tuple(torch.randn(8, WIDTH, generator=source, dtype=torch.float64) for _ in range(2))
        model.step(tuple(each.chunk(model.dp_size)[model.dp_rank] for each in batch))
    with model.whole_parameters():
        return [parameter.detach().clone() for parameter in model.parameters()], torch.rand(4)


@pytest.mark.parametrize(("line", "ranks"), [("dp=2", 2), ("dp=2,micro_batches=2", 2), ("dp=2,tp=2", 4)])
def test_copies_stay_alike(line: str, ranks: int) -> None:
    (first, _), *others = testing.run_ranks(_train, ranks, line)
    for other, _ in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_forwards_still_draw_each_rank_its_own() -> None:
    (_, one), (_, other) = testing.run_ranks(_train, 2, "dp=2")
    assert not torch.equal(one, other)


@pytest.mark.parametrize("line", ["dp=2,zero=1", "dp=2,zero=3", "pp=2"])
def test_parts_are_refused(line: str) -> None:
    with pytest.raises(mw.ApplyError, match="Langevin updates"):
        testing.run_ranks(_train, 2, line)
