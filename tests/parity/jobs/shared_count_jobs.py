"""Models whose layers count in attributes that other code uses; functions that ranks import."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.parity.jobs.never_wrong_pipeline_jobs import apply_script
from tests.parity.jobs.never_wrong_pipeline_states import WIDTH, plain_batch, square
from tests.parity.jobs.textbook_loop import losses_of
from torch import Tensor, nn

STEPS = 3


class Common:
    """An object of the user's own that layers share."""

    def __init__(self) -> None:
        self.calls = 0
        self.log: list[int] = []

    def scale(self) -> float:
        return 1.0 + self.calls


class Layer(nn.Module):
    def __init__(self, common: Any) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.common = common

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x))


class Counts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.common.calls += 1
        self.common.log.append(1)
        return super().forward(x)


class CountsWhileTraining(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.common.calls += 1
        return super().forward(x)


class DividesByCalls(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.common.calls)


class DividesByMethod(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.common.scale()


class DividesByLog(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + len(self.common.log))


class CountsItself(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class AsksItsNeighbour(Layer):
    """Reads an attribute of another layer, which it has in a list, so that this is no child of its own."""

    other: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.other[0].calls)


class CachesAWidth(Layer):
    """Computes a number when it is first asked for it."""

    @functools.cached_property
    def divisor(self) -> int:
        return 1 + self.line.in_features

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.divisor


class CachesACount(CountsItself):
    """The same of a number that changes: it is that of the first time."""

    @functools.cached_property
    def divisor(self) -> int:
        return 1 + self.calls


class Chain(nn.Module):
    def __init__(self, *kinds: type[Layer]) -> None:
        super().__init__()
        common = Common()
        self.blocks = nn.ModuleList(kind(common) for kind in kinds)
        for block, before in zip(self.blocks[1:], self.blocks, strict=False):
            if isinstance(block, AsksItsNeighbour):
                block.other = [before]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ReadsBetween(Chain):
    """The model's own code divides by a layer's count."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.calls_of_first())

    def calls_of_first(self) -> Any:
        return self.blocks[0].calls


class AsksForDivisor(Chain):
    """The model's own code asks a layer for what it caches."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x / self.blocks[0].divisor


class RootCounts(Chain):
    """A layer counts in the model itself."""

    def __init__(self) -> None:
        super().__init__(Counts, Layer, Layer, DividesByCalls)
        self.calls = 0
        self.log: list[int] = []
        for block in self.blocks:
            vars(block)["common"] = _Root(self)


class _Root:
    def __init__(self, root: nn.Module) -> None:
        object.__setattr__(self, "root", root)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "root"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.root, name, value)


MODELS = {
    "count": lambda: Chain(Counts, Layer, Layer, DividesByCalls),
    "count_while_training": lambda: Chain(CountsWhileTraining, Layer, Layer, DividesByCalls),
    "method": lambda: Chain(Counts, Layer, Layer, DividesByMethod),
    "list": lambda: Chain(Counts, Layer, Layer, DividesByLog),
    "read_before": lambda: Chain(DividesByCalls, Layer, Layer, Counts),
    "between": lambda: ReadsBetween(CountsItself, Layer, Layer, Layer),
    "root": RootCounts,
    "near": lambda: Chain(Layer, Layer, Counts, DividesByCalls, Layer, Layer),
    "neighbour": lambda: Chain(Layer, Layer, CountsItself, AsksItsNeighbour, Layer, Layer),
    "unread": lambda: Chain(Counts, Layer, Layer, Layer),
    "cached": lambda: AsksForDivisor(*[CachesAWidth] * 4),
    "cached_count": lambda: AsksForDivisor(*[CachesACount] * 4),
    "own": lambda: Chain(*[CountsItself] * 4),
}
"""By what is counted where, and read where."""


def run_planned(name: str, plan: str, evaluates: bool) -> list[float]:
    with apply_script(MODELS[name], plan=plan) as model:
        found = [model.evaluate(plain_batch(9))["loss"]] if evaluates else []
        return found + [model.step(plain_batch(step)).loss for step in range(STEPS)]


def run_plain(name: str, evaluates: bool, parts: int) -> list[float]:
    """Return the losses of a plain loop over the same micro-batches."""
    torch.manual_seed(0)
    module = MODELS[name]().double()
    found: list[float] = []
    if evaluates:
        module.eval()
        with torch.no_grad():
            found.append(float(sum(square(module(x), None) for x in plain_batch(9)[0].chunk(parts)) / parts))
        module.train()
    return found + losses_of(module, map(plain_batch, range(STEPS)), square, num_parts=parts)
