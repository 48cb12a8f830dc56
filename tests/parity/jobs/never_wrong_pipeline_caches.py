"""Models whose layers keep tables that grow, or write over what they have computed."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.jobs.never_wrong_pipeline_states import WIDTH, rows, tanh_block
from torch import Tensor, nn


class Scales(nn.Module):
    """A block with a table that it makes anew where it is too short, and one that no state dict leaves out."""

    table: Tensor
    widths: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(1, dtype=torch.float64), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("widths", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if len(self.table) < length:
            self.table = torch.arange(length, dtype=x.dtype).cos()
            self.widths = torch.ones(length, dtype=x.dtype)
            self.late = self.table.sin()
        return x + torch.tanh(self.line(x)) * (self.table + self.late)[:length, None]


class Cached(nn.Module):
    """Blocks whose caches grow with the length of what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scales() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tables(nn.Module):
    """A block that keeps tables in plain attributes, one of them in a dict, and makes them anew where they are too short."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.longest = 0
        self.tables: dict[str, Tensor] = {}
        self.steps: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.steps is None or self.longest < length:
            self.longest = length
            angles = torch.arange(length, dtype=x.dtype)
            self.tables = {"cos": angles.cos().type_as(x), "sin": angles.sin().to(x)}
            self.steps = angles[:, None] / 10
        tables = self.tables["cos"] + self.tables["sin"]
        return x + torch.tanh(self.line(x) + self.steps[:length]) * tables[:length, None]


class OwnTables(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tables() for _ in range(4))


class ShownTables(OwnTables):
    """Code between the blocks takes a block's table, by a name that no code of it says."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        name = "".join(["st", "eps"])
        return x * (1 + vars(self.blocks[0])[name][: x.shape[1]])


def varying_batch(seed: int) -> Any:
    x = rows(seed, 4, (seed % 3 * 3 + 2) * WIDTH).view(4, -1, WIDTH)
    return x, x


def growing_batch(seed: int) -> Any:
    x = rows(seed, 4, (seed % 10 + 2) * WIDTH).view(4, -1, WIDTH)
    return x, x


class OverOwnResult(nn.Module):
    """Layers that write over what a product with a parameter has just given them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lines[0](x)
        y += x
        y = torch.relu_(self.lines[1](y).view(x.shape))
        z = self.convolution(y.transpose(1, 2))
        return x + z.mul_(0.5).transpose(1, 2)


class OverOwnResults(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OverOwnResult() for _ in range(4))


class SumsUp(nn.Module):
    """Layers of the last stage add their results into zeros that the first one has made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[1](self.blocks[0](x))
        total = torch.zeros_like(h)
        total += self.blocks[2](h * 2)
        total += self.blocks[3](h * 3)
        return total
