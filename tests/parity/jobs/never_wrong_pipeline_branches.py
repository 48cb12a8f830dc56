"""Models whose forward takes another path in a later step: by chance, by a switch, by what it has counted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "Balanced",
    "CountedDraws",
    "DrawsInside",
    "LateMixing",
    "Signs",
    "fewer_blocks",
    "mixes_later",
    "seed_python",
]


class _Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.gate = nn.Linear(6, 1)
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.gate(x).square().mean()
        return x + torch.tanh(self.linear(x))


class Balanced(nn.Module):
    """Adds up what its blocks have left, also those that did not run in this step; the loss does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Balanced() for _ in range(4)])
        self.depth = 4
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x)
        self.aux = sum(block.aux for block in self.blocks)
        return x


def fewer_blocks(step: int, module: Any) -> None:
    module.depth = 4 if step < 2 else 2


# -- Python's and NumPy's random numbers, drawn inside of layers and between them -----------------------------------


class _DrawsInside(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.3:
            return x
        y = torch.tanh(self.linear(x))
        if self.training and self.place % 2:
            y = y * torch.as_tensor(np.random.rand(x.shape[0], 1))
        return x + y


class DrawsInside(nn.Module):
    """Leaves its blocks out by chance; so do the blocks with their own work, and some of them scale it by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_DrawsInside(place) for place in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or random.random() < 0.8:
                x = block(x)
        return x


class _CountedDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        scale = random.random() if self.num_calls > 2 else 1.0
        return x + scale * torch.tanh(self.linear(x))


class CountedDraws(nn.Sequential):
    """Its layers draw once they have been called some times, which other stages do not count."""

    def __init__(self) -> None:
        super().__init__(*[_CountedDraws() for _ in range(4)])


def seed_python(step: int, _module: Any) -> None:
    if step == 0:
        random.seed(4)
        np.random.seed(4)


# -- samples that see each other, from some step on -----------------------------------------------------------------


class LateMixing(nn.Module):
    """Takes the mean over the samples off, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.mixes = False

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = x + block(x)
            if self.mixes and place == 1:
                x = x - x.mean(0)
        return x


def mixes_later(step: int, module: Any) -> None:
    module.mixes = step >= 2


class Signs(nn.Module):
    """Its code between the layers decides by a number of a layer's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            if self.blocks[0].bias[0] > 0:
                x = 2 * x
        return x
