"""Experts that leave their auxiliary loss on the block, which a loss of the user's own reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.textbook_loop import losses_of
from torch import Tensor, nn

import meshwright as mw


class Experts(nn.Module):
    """Two experts for each token, weighed by a router; the balance of the batch is left in `aux`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width)) for _ in "ab")
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        self.aux = (gates.mean(0) ** 2).sum()
        return x + sum(expert(x) * gates[..., i : i + 1] for i, expert in enumerate(self.experts))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def with_aux(module: Mixture) -> Callable[[Any, Any], Tensor]:
    def loss(outputs: Any, batch: Any) -> Tensor:
        aux: Any = sum(block.aux for block in module.blocks)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return F.cross_entropy(outputs, batch[1]) + 0.3 * aux

    return loss


def build() -> Mixture:
    torch.manual_seed(0)
    return Mixture().double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 1])


Seen = tuple[list[float], dict[str, Tensor]]
"""Losses, and the gradients of the last step."""


def train(plan: str) -> Seen:
    module = build()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(module, plan, loss_fn=with_aux(module), optimizer=sgd) as model:
        losses = [model.step(batch_of(step)).loss for step in range(3)]
        return losses, {name: value for name, value in model.full_gradients().items() if value is not None}


def train_plainly() -> Seen:
    module = build()
    losses = losses_of(module, map(batch_of, range(3)), with_aux(module))
    return losses, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def with_penalty(module: Mixture) -> Callable[[Any, Any], Tensor]:
    def loss(outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1]) + 0.1 * module.head.weight.square().sum()

    return loss


def losses_beside_a_switch(plan: str | None) -> list[float]:
    """Take steps with a penalty over the last layer; a number of the model changes before the second."""
    module, losses = build(), []
    module.temperature = 1.0  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    loss_fn, sgd = with_penalty(module), functools.partial(torch.optim.SGD, lr=0.1)
    if plan is not None:
        with mw.apply_plan(module, plan, loss_fn=loss_fn, optimizer=sgd) as model:
            for step in range(2):
                losses.append(model.step(batch_of(step)).loss)
                model.module.temperature = 0.5  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return losses
    return losses_of(module, map(batch_of, range(2)), loss_fn)
