"""Pairs whose results meet a whole tensor on the way: they are not tried, unless the whole one follows the shape of the other."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.unit.apply.tensor.proof_counts import count_proofs
from torch import Tensor, nn

from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import TensorLayout


def _search(model: nn.Module, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> tuple[TensorLayout, Counter[str]]:
    """Return the layout for two ranks, and the proofs in each scope."""
    counts = count_proofs(monkeypatch)
    return Search(model.double(), 2, lambda module: module(x)).layout(), counts


class Bottleneck(nn.Module):
    """Layers of an image, around which the stream goes on where it keeps its width."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.adds = width == to
        self.expand, self.project = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, to, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.expand(x).relu())
        return x + y if self.adds else y


class Stages(nn.Module):
    """The last layer of one stage reaches only the first of the next, by way of the stream."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(4, 8), (8, 8), (8, 8), (8, 12), (12, 12)]
        self.blocks = nn.ModuleList(Bottleneck(*pair) for pair in widths)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_pair_whose_result_is_added_to_a_stream_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layout, counts = _search(Stages(), monkeypatch, torch.randn(2, 4, 3, 3, dtype=torch.float64))
    assert counts[""] == 0
    assert set(layout.cuts) >= {f"blocks.{i}.{name}.weight" for i in range(5) for name in ("expand", "project")}


class Joined(nn.Module):
    """Keys of which a part is one for all heads: what it comes from feeds another layer, and it takes the others' shape."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.down, self.up, self.out = nn.Linear(12, 7), nn.Linear(4, 20), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        own, shared = self.down(x).split([4, 3], -1)
        keys = self.up(own).view(*x.shape[:-1], self.heads, 5)
        return self.out(torch.cat([keys, shared.unsqueeze(-2).expand(*keys.shape[:-1], -1)], -1).flatten(-2).tanh())


def test_a_pair_that_meets_what_is_expanded_to_its_shape_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layout, _ = _search(nn.Sequential(Joined()), monkeypatch, torch.randn(3, 5, 12, dtype=torch.float64))
    assert layout.cuts["0.up.weight"][1].kind == "column"
    assert layout.cuts["0.out.weight"][1].kind == "row"


class Tokens(nn.Module):
    """Blocks on a stream that begins with an embedding: the last one's result reaches only the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        stream = self.embedding(x)
        for block in self.blocks:
            stream = stream + block(stream)
        return self.head(stream)


def test_a_head_behind_a_stream_of_embedded_tokens_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layout, counts = _search(Tokens(), monkeypatch, torch.arange(10).view(2, 5))
    assert counts[""] == 0
    assert set(layout.cuts) >= {f"blocks.{i}.{name}.weight" for i in range(3) for name in (0, 2)}
