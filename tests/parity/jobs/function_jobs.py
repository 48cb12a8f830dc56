"""Losses that give a model's outputs to an autograd.Function of their own, for ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw


class Copy(torch.autograd.Function):
    """The identity, with memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Reversed(torch.autograd.Function):
    """A view of other shape, whose gradient is scaled and turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.reshape(-1, x.shape[-1]).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -2 * gradients[0].reshape(ctx.shape)


def _entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def _size(outputs: Tensor) -> Tensor:
    return 0.1 * outputs.pow(2).mean()


def _watched(outputs: Tensor, batch: Any) -> Tensor:
    copied = Copy.apply(outputs)
    with torch.no_grad():
        shown = copied.argmax(-1).double().mean()
    return _entropy(copied, batch) + _size(outputs) + 0 * shown


def _overwritten(outputs: Tensor, batch: Any) -> Tensor:
    copied = Copy.apply(outputs)
    copied.mul_(2)
    return _entropy(copied, batch) + _size(outputs)


def _hooked(outputs: Tensor, batch: Any) -> Tensor:
    copied = Copy.apply(outputs)
    copied.register_hook(lambda gradient: gradient * 3)
    return _entropy(copied, batch) + _size(outputs)


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "copied": lambda outputs, batch: _entropy(Copy.apply(outputs), batch),
    "copied beside": lambda outputs, batch: _entropy(Copy.apply(outputs), batch) + _size(outputs),
    "reversed beside": lambda outputs, batch: _entropy(Reversed.apply(outputs), batch) + _size(outputs),
    "twice": lambda outputs, batch: _entropy(Copy.apply(Copy.apply(outputs) * 2), batch) + _size(outputs),
    "watched": _watched,
    "overwritten": _overwritten,
    "hooked": _hooked,
}


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def losses(plan: str, name: str) -> list[float]:
    """Return the losses of some steps."""
    generator = torch.Generator().manual_seed(0)
    optimizer = functools.partial(torch.optim.SGD, lr=0.3)
    found: list[float] = []
    with mw.apply_plan(_build, plan, loss_fn=LOSSES[name], optimizer=optimizer) as model:
        for _ in range(4):
            batch = (
                torch.randn(8, 4, generator=generator, dtype=torch.float64),
                torch.randint(0, 3, (8,), generator=generator),
            )
            found.append(model.step(mw.split_batch(batch, model)).loss)
    return found
