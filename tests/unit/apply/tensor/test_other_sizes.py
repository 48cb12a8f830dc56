"""Ways that failed for a scope, in scopes of the same code and other sizes, and scopes around most of a model."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.unit.apply.tensor.proof_counts import count_proofs
from torch import Tensor, nn

from meshwright.apply.tensor.search import regions
from meshwright.apply.tensor.search.other_sizes import ALWAYS_TRIED
from meshwright.apply.tensor.search.search import Search


class Mixed(nn.Module):
    """A pair whose entries all meet: it is cut in no way, and has many."""

    def __init__(self, width: int, heads: int, *, has_places: bool = False) -> None:
        super().__init__()
        self.heads, self.parts, self.width = heads, 4, width
        self.places = nn.Embedding(8, heads) if has_places else None
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).view(*x.shape[:-1], self.heads, -1) for layer in (self.q, self.k, self.v)]
        mixed = (heads[0] * heads[1]).cumsum(-2) * heads[2].flip(-2)
        if self.places is not None:
            mixed = mixed + self.places(torch.arange(x.shape[-2]))[..., None]
        return self.out(self.norm(mixed.flatten(-2)).softmax(-1))


def _proofs(model: nn.Module, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> Counter[str]:
    counts = count_proofs(monkeypatch)
    Search(model.double(), 2, lambda module: module(x)).layout()
    return counts


def test_what_failed_for_a_scope_is_not_tried_again_in_one_of_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mixed(24, 4), nn.Linear(24, 40), Mixed(40, 4), nn.Linear(40, 56), Mixed(56, 4))
    counts = _proofs(model, monkeypatch, torch.randn(3, 5, 24, dtype=torch.float64))
    assert counts["0"] > 2 * ALWAYS_TRIED
    assert max(counts["2"], counts["4"]) <= counts["0"] // 2


def test_what_failed_is_not_tried_again_where_a_layer_of_the_class_has_one_more_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mixed(24, 4, has_places=True), Mixed(24, 4))
    counts = _proofs(model, monkeypatch, torch.randn(3, 5, 24, dtype=torch.float64))
    assert counts["0"] > 2 * ALWAYS_TRIED
    assert counts["1"] <= 2 * ALWAYS_TRIED


class Around(nn.Module):
    """A pair at both ends of a model, with layers between that use the first one's result."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.parts, self.width = 4, 2, 16
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(regions.MANY_BESIDE + 3)))
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.body(x.detach()).sigmoid().detach().mean(-1, keepdim=True)  # of one entry: shards of any width fit
        heads = [layer(x).view(*x.shape[:-1], self.heads, -1) for layer in (self.q, self.k, self.v)]
        mixed = (heads[0] * heads[1]).cumsum(-2) * heads[2].flip(-2)
        return self.out(self.norm(mixed.flatten(-2) * gate).softmax(-1))


def test_a_scope_around_most_of_the_model_is_given_up_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    counts = _proofs(nn.Sequential(Around()), monkeypatch, torch.randn(3, 5, 16, dtype=torch.float64))
    assert ALWAYS_TRIED < counts["0"] <= regions.MAX_TRIALS_AROUND


class Checked(Mixed):
    """A pair whose code refuses a part of the width, whatever else is changed."""

    def forward(self, x: Tensor) -> Tensor:
        if self.q(x).shape[-1] != len(self.out.weight):
            raise ValueError("the width is not the model's")
        return super().forward(x)


def test_a_scope_whose_ways_fail_for_one_reason_is_given_up_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    counts = _proofs(nn.Sequential(Checked(24, 4)), monkeypatch, torch.randn(3, 5, 24, dtype=torch.float64))
    assert ALWAYS_TRIED < counts["0"] <= regions.MOST_ALIKE + 2 < regions.MAX_TRIALS
