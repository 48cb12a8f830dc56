"""Models whose forward takes another path, or leaves a result unused, in a later step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Balanced", "fewer_blocks"]


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
