"""Training of models that cut padding off inside of their forward, so that lengths depend on which samples lie together."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw


class Trimmed(nn.Module):
    """One block on the longest sample's length, which draws in a tensor whose length is not its outermost dim."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids[:, : int((ids != 0).sum(1).max())]
        is_there = ids != 0
        x = self.embedding(ids)
        return ((x + getattr(self, self.kind)(x, is_there)) * is_there[..., None]).sum(1) / 8

    def attention(self, x: Tensor, is_there: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).masked_fill(~is_there[:, None, None, :], -1e9).softmax(-1)
        return self.out((F.dropout(weights, 0.3, self.training) @ v).transpose(1, 2).reshape(x.shape))

    def fused(self, x: Tensor, is_there: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        rate = 0.3 if self.training else 0.0
        mask = is_there[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def convolution(self, x: Tensor, is_there: Tensor) -> Tensor:
        channels = self.conv((x * is_there[..., None]).transpose(1, 2))
        return F.dropout(channels, 0.3, self.training).transpose(1, 2)

    def noise(self, x: Tensor, is_there: Tensor) -> Tensor:
        return torch.randn_like(x.transpose(1, 2)).transpose(1, 2) * 0.3


KINDS = ("attention", "fused", "convolution", "noise")


def _build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Trimmed(kind).double()


def _loss(outputs: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs - pair[1]).square().mean()


def _batch(step: int, *, is_padded: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, 9, (5,), generator=generator) if is_padded else torch.full((5,), 8)
    ids = torch.randint(1, 20, (5, 8), generator=generator) * (torch.arange(8) < lengths[:, None])
    return ids, torch.randn(5, 8, generator=generator, dtype=torch.float64)


def train(kind: str, line: str, *, is_first_padded: bool) -> tuple[list[float], list[str]]:
    """Return the losses of four steps, and what the plan tells of random numbers; later batches are padded."""
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    with mw.apply_plan(functools.partial(_build, kind), line, loss_fn=_loss, optimizer=sgd) as model:
        batches = [_batch(step, is_padded=bool(step) or is_first_padded) for step in range(4)]
        losses = [model.step(mw.split_batch(batch, model)).loss for batch in batches]
        return losses, [reason for reason in model.plan.reasons if reason.startswith("rng")]
