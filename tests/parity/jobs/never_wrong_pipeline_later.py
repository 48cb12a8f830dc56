"""Models whose layers begin to write their own state with a later batch, where other code reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.parity.jobs.never_wrong_pipeline_kinds import is_far
from tests.parity.jobs.never_wrong_pipeline_states import WIDTH, tanh_block
from torch import Tensor, nn


def _write(layer: Any, level: Tensor) -> None:
    layer.level.copy_(level)


def _replace(layer: Any, level: Tensor) -> None:
    layer.level = level.reshape(1)


def _register(layer: Any, level: Tensor) -> None:
    layer.register_buffer("late", level.reshape(1))


def _count(layer: Any, level: Tensor) -> None:
    layer.count = int(level)


def _count_new(layer: Any, level: Tensor) -> None:
    layer.late = int(level)


WAYS: dict[str, Callable[[Any, Tensor], None]] = {
    "copy": _write,
    "data": lambda layer, level: layer.write_data(level),
    "new": _replace,
    "late": _register,
    "count": _count,
    "late_count": _count_new,
}
"""Name -> writes a number into a layer's own state."""


class _Writes(nn.Module):
    level: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.line, self.way, self.count = nn.Linear(WIDTH, WIDTH), way, 0
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x).tanh()
        if is_far(x):
            WAYS[self.way](self, x.detach().mean())
        return h

    def write_data(self, level: Tensor) -> None:
        self.level.data.copy_(level)


class WritesLater(nn.Module):
    """Code on later stages that scales by what a layer writes into its buffers and attributes for some values."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.writes, self.blocks = _Writes(way), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.writes(x)
        for block in self.blocks:
            x = block(x)
        late = getattr(self.writes, "late", 0)
        return x * (1 + self.writes.level + self.writes.count + late)


class _Reads(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.others, self.line = [layer], nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * (1 + self.others[0].level)


class ReadByLayer(nn.Module):
    """A layer that reads another one's buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.blocks = _Writes("copy"), nn.ModuleList(tanh_block() for _ in range(3))
        self.reads = _Reads(self.writes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.writes(x)
        for block in self.blocks:
            x = block(x)
        return self.reads(x)
