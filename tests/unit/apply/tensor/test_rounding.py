"""Differences that steps behind a cut have made of rounding: such a pair is given up, since no other way is nearer."""

from __future__ import annotations

import pytest
import torch
from tests.unit.apply.tensor.proof_counts import count_proofs
from torch import Tensor, nn

from meshwright.apply.tensor.proof.shards_against_whole import Disproof, DisprovedError, check_equal, check_gradient
from meshwright.apply.tensor.search.search import Search


@pytest.mark.parametrize(
    ("factor", "of_results", "of_gradients"),
    [
        (1e-9, Disproof.ROUNDING, Disproof.ROUNDING),
        (1e-5, Disproof.RESULT_VALUES, Disproof.GRADIENT_VALUES),
        (1.0, Disproof.RESULT_VALUES, Disproof.GRADIENT_VALUES),
    ],
)
def test_a_near_difference_is_told_from_others(factor: float, of_results: Disproof, of_gradients: Disproof) -> None:
    whole = torch.linspace(1.0, 2.0, 7, dtype=torch.float64)
    with pytest.raises(DisprovedError) as found:
        check_equal(whole * (1.0 + factor), whole, "it")
    assert found.value.difference.kind is of_results
    with pytest.raises(DisprovedError) as found:
        check_gradient(whole * (1.0 + factor), whole, "it", 1.0)
    assert found.value.difference.kind is of_gradients


class Steep(nn.Module):
    """A pair, and steps behind it that make a difference of its result ten million times as large."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.heads = 4
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(self.up(x).view(len(x), self.heads, -1).tanh().flatten(1))
        return x + (inner * self.slope).sin()


@pytest.mark.parametrize(("slope", "is_cut"), [(1.0, True), (1e7, False)])
def test_a_pair_before_steep_steps_is_tried_once(monkeypatch: pytest.MonkeyPatch, slope: float, is_cut: bool) -> None:
    torch.manual_seed(0)
    counts = count_proofs(monkeypatch)
    x = torch.randn(6, 8, dtype=torch.float64)
    layout = Search(Steep(slope).double(), 2, lambda module: module(x)).layout(on_slices=False)
    assert counts[""] == 1
    assert any(not region.is_apart for region in layout.regions) is is_cut
