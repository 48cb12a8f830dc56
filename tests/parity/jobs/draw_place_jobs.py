"""Training of models that draw at several places in the code of one module."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.parity.models.draw_place_models import MODELS, batch
from torch import Tensor, nn

import meshwright as mw


def _build(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name]().double()


def _loss(outputs: Tensor, given: Any) -> Tensor:
    return (outputs - given[1]).square().mean()


def train(name: str, line: str, *, steps: int = 4, count: int = 6) -> tuple[list[float], list[float], list[str]]:
    """Return the losses, gradient norms and reasons of steps under a plan."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = mw.apply_plan(functools.partial(_build, name), line, loss_fn=_loss, optimizer=sgd, seed=3)
    results = [model.step(mw.split_batch(batch(name, step, count), model)) for step in range(steps)]
    reasons = [reason for reason in model.plan.reasons if reason.startswith("rng")]
    model.close()
    return [result.loss for result in results], [result.grad_norm for result in results], reasons
