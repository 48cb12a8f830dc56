"""Training of models whose values choose the rows that draw."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.parity.models.chosen_rows_models import MODELS, TOLD, batch
from tests.parity.models.sample_blocks_models import BLOCKS, UNKNOWN
from tests.tolerances import FLOAT64
from torch import Tensor, nn

import meshwright as mw

Trained = tuple[list[float], list[float], list[str]]
"""Losses, gradient norms and reasons."""


def _build(name: str) -> nn.Module:
    torch.manual_seed(5)
    return (MODELS | TOLD | BLOCKS | UNKNOWN)[name]().double()


def _loss(outputs: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs, given[1])


def train(name: str, line: str, *, steps: int = 3, count: int = 7, every: int = 1, grows: bool = True) -> Trained:
    """Return the losses, gradient norms and reasons of steps under a plan, on batches of other sizes from the second on."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = mw.apply_plan(
        functools.partial(_build, name), line, loss_fn=_loss, optimizer=sgd, seed=3, sentinel_every=every
    )
    results = [model.step(mw.split_batch(batch(name, step, count + step * grows), model)) for step in range(steps)]
    reasons = [reason for reason in model.plan.reasons if reason.startswith("rng")]
    model.close()
    return [result.loss for result in results], [result.grad_norm for result in results], reasons


def check(found: Trained, wanted: Trained) -> None:
    """Compare a training with one process's: it has its numbers, and nothing is told."""
    assert found[0] == pytest.approx(wanted[0], rel=FLOAT64)
    assert found[1] == pytest.approx(wanted[1], rel=FLOAT64)
    assert not found[2]
