"""Modules that the tests describe, and batches for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList([Mlp() for _ in range(2)])
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class TiedByHand(Tied):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.embedding.weight)


class Experts(nn.Module):
    """Routing whose sizes depend on values."""

    def __init__(self, width: int = 8, num_experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList([Mlp(width) for _ in range(num_experts)])

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            out[rows, places] = expert(x[rows, places])
        return out


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU()),
        nn.Sequential(nn.ConvTranspose2d(8, 4, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(4, 10),
    )


def ids_of(num_samples: int, length: int = 12, top: int = 40):
    return (torch.arange(num_samples * length).reshape(num_samples, length) % top,)


def floats_of(num_samples: int, *shape: int):
    return (torch.randn(num_samples, *shape),)
