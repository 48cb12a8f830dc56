"""What ranks run in `test_held_outputs`: a model that returns a number of a parameter that its last stage does not hold."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Pair(nn.Module):
    """Features of two towers, and the temperature of their comparison, as CLIP returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 3))
        self.right = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x), self.right(x), self.scale.exp()


def build() -> nn.Module:
    torch.manual_seed(3)
    return Pair().double()


def loss_fn(outputs: Any, batch: Any) -> Tensor:
    left, right, _ = outputs
    return ((left * right).sum(1) - batch[1]).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(6, 4, dtype=torch.float64, generator=generator),
        torch.randn(6, dtype=torch.float64, generator=generator),
    )


def outputs_and_losses(plan: str) -> tuple[list[Tensor], list[float]]:
    """Return what the model gives in evaluation mode before and after two steps, and the losses of these."""
    with mw.apply_plan(build, plan, loss_fn=loss_fn, optimizer=SGD, seed=1) as model:
        losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(2)]
        model.eval()
        with torch.no_grad():
            return [tensor.clone() for tensor in model(batch(2)[0])], losses
