"""Biases of queries and values that are put together with a buffer before a product takes them, cut with its heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.apply.tensor.search.search import Search

WIDTH, HEADS = 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.k_bias: Tensor
        self.register_buffer("k_bias", torch.zeros(WIDTH))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x, weight=self.qkv.weight, bias=bias).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.attention(x)).mean(1))


def test_biases_that_are_put_together_are_cut_with_their_heads() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    layout = Search(Model().double(), 2, lambda module: module(x)).layout()
    names = {"qkv.weight", "q_bias", "k_bias", "v_bias", "proj.weight"}
    assert {f"attention.{name}" for name in names} <= layout.cuts.keys()
