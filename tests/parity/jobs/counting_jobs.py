"""A model that counts its forwards, and a script that goes on after a step that raised; ranks import this."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw


class Counting(nn.Module):
    """Four layers, and an output that depends on how often the forward has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        if bool((x > 90).any()):
            raise ValueError("a sample that nobody expected")
        return self.head(h) / (1 + 0.1 * self.calls)


def loss_fn(outputs: Tensor, pair: Any) -> Tensor:
    return ((outputs - pair[1]) ** 2).mean()


def batch(number: int, bad: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    if bad:
        x[-1] = 100.0
    return x, torch.randn(8, 1, generator=generator, dtype=torch.float64)


def losses(plan: str) -> list[float | str]:
    """Return the losses of five steps, of which the third raises, and the types of what is raised."""
    model = mw.apply_plan(
        lambda: Counting().double(), plan, loss_fn=loss_fn, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    )
    found: list[float | str] = []
    for number in range(5):
        try:
            found.append(model.step(batch(number, number == 2)).loss)
        except (ValueError, mw.MeshwrightError) as error:
            found.append(type(error).__name__)
    return found
