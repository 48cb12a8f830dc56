"""Modules whose forward takes numbers of an iterator that they keep; ranks import them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def growing(scale: float = 0.1) -> Iterator[float]:
    number = 0
    while True:
        number += 1
        yield 1 + scale * number


class Grows:
    """An iterator whose state is in plain attributes."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Grows:
        return self

    def __next__(self) -> float:
        self.number += 1
        return 1 + 0.1 * self.number


class Holder:
    """An object that draws of a generator."""

    def __init__(self) -> None:
        self.numbers = [growing()]

    def __next__(self) -> float:
        return next(self.numbers[0])


ITERATORS: dict[str, Any] = {
    "generator": growing,
    "map": lambda: map(float, itertools.count(1)),
    "islice": lambda: itertools.islice(growing(), 100),
    "inside": Holder,
}
KEPT: dict[str, Any] = {"list": lambda: iter([1 + 0.1 * k for k in range(100)]), "class": Grows}


class Drawing(nn.Module):
    """A block that scales by the next number; `batches` is an iterator that its forward does not read."""

    def __init__(self, numbers: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.numbers = numbers
        self.batches = growing()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x)) * self.draw()

    def draw(self) -> float:
        return next(self.numbers)


def build(kind: str) -> nn.Module:
    numbers = (ITERATORS | KEPT)[kind]
    return nn.Sequential(Drawing(numbers()), Drawing(numbers()), nn.Linear(6, 4)).double()


def builder(kind: str) -> Any:
    return functools.partial(build, kind)
