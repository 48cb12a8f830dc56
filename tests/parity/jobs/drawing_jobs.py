"""Training with random numbers in forwards, by place."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch
from tests.parity.models.drawing_models import CASES
from torch import nn

import meshwright as mw


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run was."""

    losses: list[float]
    norms: list[float]
    reasons: tuple[str, ...]
    layouts: dict[str, str]


def train(
    case: str, line: str, *, steps: int = 2, count: int = 7, rng: str = "global", first: int = 0, directory: str = ""
) -> Trained:
    """Train a case under a plan, from step `first` of the checkpoint in `directory`, or from the start, and save there."""
    build, loss, batches = CASES[case]
    model = mw.apply_plan(
        build,
        line,
        loss_fn=loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        seed=3,
        rng=rng,
        sentinel_every=2,  # whose inspections run layers again
    )
    losses, norms = [], []
    if first:
        mw.load_checkpoint(model, Path(directory))
    for step in range(first, first + steps):
        result = model.step(mw.split_batch(batches(step, count), model))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    if directory and not first:
        mw.save_checkpoint(model, Path(directory), step=first + steps)
    reasons = tuple(reason for reason in model.plan.reasons if reason.startswith("rng"))
    layouts = dict(model.plan.layouts)
    model.close()
    return Trained(losses, norms, reasons, layouts)


class Noting(nn.Module):
    """Keeps what its dropout gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result, of which a half is left out."""
        self.seen.append(self.drop(torch.ones_like(x)))
        return self.layer(x) * self.seen[-1]


def train_noted(seed: int) -> list[torch.Tensor]:
    """Return the masks of two steps."""
    module = Noting()
    model = mw.apply_plan(module, "single", loss_fn=lambda out, _: out.square().mean(), seed=seed, rng="global")
    for _ in range(2):
        model.step((torch.ones(4, 8), None))
    model.close()
    return module.seen[-2:]


class DrawsInBackward(nn.Module):
    """Adds noise to its gradient, which no trial sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result."""
        result = self.layer(x)
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return result


def reasons_after_the_first_step(plan: str) -> tuple[str, ...]:
    """Return what this rank's plan says after one step of a model whose last layer draws."""
    build = functools.partial(nn.Sequential, nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), DrawsInBackward())
    model = mw.apply_plan(build, plan, loss_fn=lambda out, _: out.square().mean())
    model.step(mw.split_batch((torch.ones(4, 8), torch.ones(4)), model))
    model.close()
    return model.plan.reasons
