"""A model whose first forward makes a parameter."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw


class Makes(nn.Module):
    """Scales its inputs by a parameter that it makes when it first needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.full((6,), 0.5, dtype=x.dtype))
        return self.down(torch.tanh(self.middle(torch.tanh(self.up(x * self.scale))))) - y


class Replaces(Makes):
    """Puts another layer in a layer's place in its first forward, with a new one behind it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not isinstance(self.middle, nn.Sequential):
            self.middle = nn.Sequential(self.middle, nn.Linear(16, 16).to(x))
        return self.down(torch.tanh(self.middle(torch.tanh(self.up(x))))) - y


class Renames(Makes):
    """Keeps a layer by another name, too, from its first forward on."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.same = self.middle
        return self.down(torch.tanh(self.same(torch.tanh(self.up(x))))) - y


def build(*, runs_once: bool, kind: type[Makes] = Makes) -> nn.Module:
    torch.manual_seed(0)
    model = kind().double()
    if runs_once:
        model(**batch(0))
    return model


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randn(8, 3, generator=generator, dtype=torch.float64)}


def squares(outputs: Tensor, _: Any) -> Tensor:
    return outputs.square().mean()


def train(line: str, *, runs_once: bool, kind: type[Makes] = Makes) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses, and the state at the end."""
    make = functools.partial(build, runs_once=runs_once, kind=kind)
    model = mw.apply_plan(make, line, loss_fn=squares, optimizer=lambda own: torch.optim.SGD(own, lr=0.1))
    losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(2)]
    return losses, model.full_state_dict()


def run_once(line: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model that has run once before it is given to a plan."""
    return train(line, runs_once=True)


def run_fresh(line: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model whose first forward is the plan's."""
    return train(line, runs_once=False)


def run_replacing(line: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model whose first forward replaces a layer."""
    return train(line, runs_once=False, kind=Replaces)


def run_renaming(line: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model whose first forward gives a layer a second name."""
    return train(line, runs_once=False, kind=Renames)
