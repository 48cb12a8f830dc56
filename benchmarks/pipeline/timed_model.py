"""A model whose layers take a given time and no processor: every phase of a block is a sleep beside a tiny linear layer.

Where a sleep happens is decided by autograd alone, the same way under every library. The forward and the input's gradient are
slept through in a function between the block's input and its layer; the weight's gradient in a hook on the weight, which
autograd calls when that gradient is there. So whoever puts weights' gradients off puts the sleep off with them.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
NUM_TOKENS = 16
NUM_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class Times:
    """How long a block sleeps in each phase [s]."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float

    def of(self, phase: str) -> float:
        return {"F": self.forward_s, "I": self.input_grad_s, "W": self.weight_grad_s}[phase]


@dataclasses.dataclass
class Clock:
    """Sleeps, and notes (block, phase, how long it really was)."""

    times: Times
    slept: list[tuple[int, str, float]] = dataclasses.field(default_factory=list)

    def sleep(self, block: int, phase: str) -> None:
        start = time.perf_counter()
        time.sleep(self.times.of(phase))
        self.slept.append((block, phase, time.perf_counter() - start))

    def take(self) -> list[tuple[int, str, float]]:
        slept, self.slept = self.slept, []
        return slept


class _Timed(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, block: int) -> Tensor:
        ctx.clock, ctx.block = clock, block
        clock.sleep(block, "F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.sleep(ctx.block, "I")
        return gradients[0], None, None


class Block(nn.Module):
    """x + linear(x)."""

    def __init__(self, clock: Clock, index: int) -> None:
        super().__init__()
        self.clock = clock
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.register_hook(self._sleep_for_weight)

    def _sleep_for_weight(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # while it is put off, some call the hook without one
            self.clock.sleep(self.index, "W")

    def forward(self, x: Tensor) -> Tensor:
        x = _Timed.apply(x, self.clock, self.index)  # pyright: ignore[reportAssignmentType] - apply is untyped
        return x + F.linear(x, self.linear.weight, self.linear.bias)


def build(clock: Clock) -> nn.Sequential:
    """Return the same model on every rank and side: a table, so that the first block has an input's gradient too, and blocks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(NUM_TOKENS, WIDTH), *(Block(clock, index) for index in range(NUM_BLOCKS)))


def make_batch(step: int, num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(NUM_TOKENS, (num_samples,), generator=generator)
    return ids, torch.randn(num_samples, WIDTH, generator=generator)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)
