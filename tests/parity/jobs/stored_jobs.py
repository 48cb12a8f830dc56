"""Training of models whose weights are kept in parts and put together for each use."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from tests.parity.models import stored_models
from torch import Tensor, nn

import meshwright as mw

Trained = tuple[list[float], dict[str, Tensor], dict[str, str], list[str]]


def _loss(outputs: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), given[1].flatten())


def train(name: str, line: str, num_steps: int = 3) -> Trained:
    """Return losses of steps and evaluations on batches of other sizes, parameters, layouts and the reasons of the plan."""
    model = mw.apply_plan(
        functools.partial(stored_models.build, name),
        line,
        loss_fn=_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        seed=3,
        sentinel_every=1,
    )
    losses: list[float] = []
    for step in range(num_steps):
        losses.append(model.step(mw.split_batch(stored_models.batch(step), model)).loss)
        with torch.inference_mode():
            losses.append(model.evaluate(mw.split_batch(stored_models.batch(step + 1), model))["loss"])
    reasons, layouts = [str(reason) for reason in model.plan.reasons], dict(model.plan.layouts)
    with model.whole_parameters():
        values = {key: value.detach().clone() for key, value in model.module.named_parameters()}
    model.close()
    return losses, values, layouts, reasons


def go_on(name: str, line: str, directory: str, *, first: int, steps: int) -> list[float]:
    """Return the losses of steps from the checkpoint of step `first` in a directory on, or from the start, and save there."""
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    build = functools.partial(stored_models.build, name)
    with mw.apply_plan(build, line, loss_fn=_loss, optimizer=adamw, seed=3) as model:
        if first:
            assert mw.load_checkpoint(model, Path(directory)) == first
        batches = [stored_models.batch(step) for step in range(first, first + steps)]
        losses = [model.step(mw.split_batch(batch, model)).loss for batch in batches]
        mw.save_checkpoint(model, Path(directory), step=first + steps)
        return losses


class Writes(nn.Module):
    """A forward that writes into its weight where torch counts no write."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        given = x @ self.weight.softmax(0)
        self.weight.data.mul_(0.5)
        return given
