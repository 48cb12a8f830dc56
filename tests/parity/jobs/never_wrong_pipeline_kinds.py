"""Models whose layers return, or write, things of another kind for values that the first batch does not show."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.parity.jobs.never_wrong_pipeline_states import WIDTH, rows, tanh_block
from torch import Tensor, nn


def far_batch(seed: int) -> Any:
    """Return a batch; those of odd numbers lie where no made-up value does."""
    return rows(seed) + 5 * (seed % 2), rows(seed + 100)


def is_far(x: Tensor) -> bool:
    """Tell where a batch lies, in a way that no search can answer otherwise: NumPy computes it."""
    return bool(np.asarray(x.detach()).mean() > 3)


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


@dataclasses.dataclass
class Count:
    number: int


@dataclasses.dataclass
class Held:
    tensor: Tensor
    number: int


KINDS: dict[str, tuple[Callable[[bool], Any], Callable[[Any], float]]] = {
    "enum": (lambda far: Size.LARGE if far else Size.SMALL, lambda kind: kind.value),
    "array": (lambda far: np.array([int(far)]), lambda kind: float(kind[0])),
    "numpy": (np.int64, float),
    "object": (lambda far: [Count(int(far))], lambda kind: kind[0].number),
    "output": (lambda far: Held(torch.ones(2), int(far)), lambda kind: kind.number),
    "set": (lambda far: {1, 2} if far else {1}, len),
    "negative": (lambda far: -1 if far else -2, float),
    "flag": (lambda far: True if far else 1, lambda kind: 1.0 if kind is True else 0.0),
    "none": (lambda far: None if far else 1, lambda kind: 0.0 if kind is None else 1.0),
    "partial": (lambda far: functools.partial(pow, 2 if far else 3), lambda kind: kind(2)),
}
"""Name -> (makes what a layer returns, the number that code between layers takes from it)."""


class _Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.line, self.make = nn.Linear(WIDTH, WIDTH), KINDS[kind][0]

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.line(x).tanh(), self.make(is_far(x))


class ReturnsKind(nn.Module):
    """Code on later stages that scales by what a layer returns beside a tensor.

    Args:
        kind: A key of `KINDS`.
        is_late: Whether the layer is the last one.
    """

    def __init__(self, kind: str, *, is_late: bool = False) -> None:
        super().__init__()
        self.returns, self.kind, self.is_late = _Returns(kind), kind, is_late
        self.blocks = nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_late:
            for block in self.blocks:
                x = block(x) + x
        x, kind = self.returns(x)
        if not self.is_late:
            for block in self.blocks:
                x = block(x)
        return x * (1 + KINDS[self.kind][1](kind))


class _Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, notes: dict[str, Any]) -> Tensor:
        notes["count"] = Count(int(is_far(x)))
        return self.line(x).tanh()


class WritesNumber(nn.Module):
    """Code on later stages that scales by a number which a layer has written into a dict that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.notes, self.blocks = _Notes(), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        notes: dict[str, Any] = {}
        x = self.notes(x, notes)
        for block in self.blocks:
            x = block(x)
        return x * (1 + notes["count"].number)


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x).tanh()
        self.kept = (h, int(is_far(x)))
        return h


class KeepsNumber(nn.Module):
    """The same, of a number that lies beside a tensor in a layer's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps, self.blocks = _Keeps(), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.keeps(x)
        for block in self.blocks:
            x = block(x)
        return x * (1 + self.keeps.kept[1]) + self.keeps.kept[0]


class _Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + self.down(self.up(x).tanh())
        return h, h[:, : 4 if is_far(x) else 2]


class ReturnsHalf(nn.Module):
    """Code on later stages that counts the columns of a result: four, or two, which two shards of four would have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.blocks = _Halves(), nn.ModuleList(_Halves() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, part = self.halves(x)
        for block in self.blocks:
            x = block(x)[0]
        return x * part.shape[1]


class _Marks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.is_far = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        if is_far(x):
            self.is_far = True
        return self.line(x).tanh()


class MarksFar(nn.Module):
    """Code on later stages that reads a flag which a layer sets for some values."""

    def __init__(self) -> None:
        super().__init__()
        self.marks, self.blocks = _Marks(), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.marks(x)
        for block in self.blocks:
            x = block(x)
        return x * 2 if self.marks.is_far else x


class _Grows(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(1, WIDTH), persistent=False)

    def forward(self, x: Tensor, count: int) -> Tensor:
        if count > len(self.table):
            self.table = torch.ones(count, WIDTH)
        return self.line(x).tanh() + self.table[:count].mean(0)


class GrowsTable(nn.Module):
    """Code on later stages that asks for the length of a table which a layer lets grow."""

    def __init__(self) -> None:
        super().__init__()
        self.grows, self.blocks = _Grows(), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.grows(x, 4 if x.mean() > 3 else 1)
        for block in self.blocks:
            x = block(x)
        return x * len(self.grows.table)
