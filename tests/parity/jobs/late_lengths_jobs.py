"""Attention that takes its width from its input, and looks at some of its keys or at a table by length; lengths change later."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

WIDTH, HEADS, MOST = 16, 4, 8
LENGTHS = (5, 6, 8)


class Attention(nn.Module):
    """As nanoGPT's: `x.shape` gives the width, so that sizes are translated under tp."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.num_heads = kind, HEADS
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0.5, 1.5, MOST)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.num_heads, c // self.num_heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2)
        )
        if self.kind == "cropped":
            k, v = k[:, :, :MOST], v[:, :, :MOST]
        else:
            q = q * self.table[:t]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        return x + self.proj(y)


def build(kind: str) -> nn.Module:
    """Return the model."""
    return nn.Sequential(nn.Linear(3, WIDTH), Attention(kind)).double()


def batch(length: int) -> tuple[Tensor, Tensor]:
    """Return two samples."""
    drawn = torch.Generator().manual_seed(length)
    return tuple(torch.randn(2, length, size, generator=drawn, dtype=torch.float64) for size in (3, WIDTH))  # pyright: ignore[reportReturnType]


def _loss(outputs: Tensor, given: Any) -> Tensor:
    return (outputs - given[1]).square().mean()


def plain(kind: str) -> list[float]:
    """Return the losses of a plain loop."""
    torch.manual_seed(0)
    module = build(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for length in LENGTHS:
        optimizer.zero_grad()
        given = batch(length)
        loss = _loss(module(given[0]), given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def planned(kind: str) -> tuple[list[float], bool]:
    """Return the losses under tp=2, and whether the first batch cut the attention."""
    model = mw.apply_plan(
        lambda: build(kind), "tp=2", loss_fn=_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1), seed=0
    )
    losses = [model.step(batch(LENGTHS[0])).loss]
    is_cut = model.module[1].qkv.weight.shape[0] < 3 * WIDTH
    losses += [model.step(batch(length)).loss for length in LENGTHS[1:]]
    model.close()
    return losses, is_cut
