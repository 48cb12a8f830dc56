"""A model that a script has run before the plan, whose outputs it keeps with their graph."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import meshwright as mw

STEPS = 2


def batch(step: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def build(kept: list[Tensor]) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    kept.append(module(batch(9)))
    return module


def squares(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.square().mean()


def train(line: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two steps, and the state after them."""
    kept: list[Tensor] = []
    model = mw.apply_plan(
        functools.partial(build, kept),
        line,
        loss_fn=squares,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        seed=0,
    )
    losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(STEPS)]
    assert kept[0].grad_fn is not None
    return losses, model.full_state_dict()
