"""Work of a search: it is counted in functions, and what is not proven by its end is cut layer by layer, or stays whole."""

from __future__ import annotations

import pytest
import torch
from tests.unit.apply.tensor.proof_counts import count_proofs
from torch import Tensor, nn

from meshwright.apply.tensor.search import failed_work, regions, sequences
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout


class Long(nn.Module):
    """A pair whose entries all meet, in a forward of many steps."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.heads, self.parts, self.num_steps = 4, 4, num_steps
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(len(x), self.heads, -1) for layer in (self.q, self.k, self.v))
        mixed = (q * k).cumsum(-2) * v.flip(-2)
        for _ in range(self.num_steps):
            mixed = mixed.roll(1, -2).tanh()
        return self.out(self.norm(mixed.flatten(-2)).softmax(-1))


class Block(nn.Module):
    """Two layers that are a pair, of an own width: no block is another one's twin."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, inner), nn.Linear(inner, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def _layout(model: nn.Module, num_rows: int = 6) -> TensorLayout:
    x = torch.randn(num_rows, 8, dtype=torch.float64)
    return Search(model.double(), 2, lambda module: module(x)).layout(on_slices=False)


def _blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Long(1), *(Block(8 + 4 * place) for place in range(3)))


_PAIRS = {f"{place}.{name}.weight" for place in (1, 2, 3) for name in ("up", "down")}


def test_pairs_after_the_work_is_done_are_cut_one_by_one_and_the_reason_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _PAIRS.isdisjoint(_layout(_blocks()).alone)
    monkeypatch.setattr(failed_work, "MAX_WORK", 40)
    layout = _layout(_blocks())
    assert set(layout.cuts) >= _PAIRS
    assert set(layout.alone) >= _PAIRS
    assert all("functions, and the search ends after 40" in layout.alone[name] for name in _PAIRS)


def test_proofs_that_come_to_something_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_work, "MAX_WORK", 1)
    torch.manual_seed(0)
    assert not _layout(nn.Sequential(*(Block(8 + 4 * place) for place in range(3)))).alone


def test_the_work_is_the_same_for_every_size_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_work, "MAX_WORK", 40)
    assert _layout(_blocks(), 6).alone == _layout(_blocks(), 700).alone


def _num_proofs(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> int:
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        counts = count_proofs(patch)
        _layout(nn.Sequential(Long(num_steps)))
    return counts["0"]


def test_a_pair_in_a_large_scope_has_fewer_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_work, "PAIR_WORK", 20 * 200)  # twenty proofs of so many functions
    small, large = _num_proofs(1, monkeypatch), _num_proofs(100, monkeypatch)
    assert failed_work.LEAST_TRIALS <= large <= 20 < small


class Summed(nn.Module):
    """Three pairs, each in two modules at which the sequence may be gathered, and a sum over positions that no slice has."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) + sum(branch(x) for branch in self.branches)


def test_slices_of_a_layer_that_fail_for_one_reason_are_given_up_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    check = sequences._LayerTrial.check

    def counted(self: sequences._LayerTrial, way: tuple[Region, ...], dims: tuple[int, ...]) -> object:
        ways.append(self.name)
        return check(self, way, dims)

    monkeypatch.setattr(sequences._LayerTrial, "check", counted)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Summed()).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    layout = Search(model, 2, lambda module: module(x)).layout()
    assert ("1",) not in [chain.layers for chain in layout.chains]
    assert len(layout.regions) >= 3
    assert regions.MOST_ALIKE_AROUND < ways.count("1") <= regions.MOST_ALIKE_AROUND + 3 < 27
