"""Pairs around one large module are proven in one experiment; what is known of their surroundings needs no proof."""

from __future__ import annotations

import pytest
import torch
from tests.unit.apply.tensor.proof_counts import count_proofs
from torch import Tensor, nn

from meshwright.apply.tensor.search import joint_proofs
from meshwright.apply.tensor.search.regions import Proving
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout


class Stages(nn.Module):
    """Layers of other widths each, one after the other, in one forward: pairs of neighbours, none like another.

    Args:
        mixing: Places of pairs between whose layers all entries meet.
    """

    def __init__(self, *mixing: int) -> None:
        super().__init__()
        self.mixing = mixing
        self.up = nn.ModuleList(nn.Linear(8, 8 + 4 * place) for place in range(4))
        self.down = nn.ModuleList(nn.Linear(8 + 4 * place, 8) for place in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for place, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            inner = up(x)
            x = x + down(inner.softmax(-1) if place in self.mixing else inner.tanh())
        return x


def _layout(model: nn.Module) -> TensorLayout:
    x = torch.linspace(-2.0, 2.0, 48, dtype=torch.float64).view(6, 8).sin()
    return Search(model.double(), 2, lambda module: module(x)).layout(on_slices=False)


def _together(monkeypatch: pytest.MonkeyPatch, work: int = 1) -> list[int]:
    """Return a list that gets how many regions each experiment proves, from now on."""
    monkeypatch.setattr(joint_proofs, "LARGE_WORK", work)
    counts: list[int] = []
    prove = Proving.prove_together

    def counted(self: Proving, scope: str, regions: list[Region]) -> bool:
        counts.append(len(regions))
        return prove(self, scope, regions)

    monkeypatch.setattr(Proving, "prove_together", counted)
    return counts


def test_pairs_of_one_module_are_proven_in_one_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Stages()
    alone = _layout(model)
    counts = _together(monkeypatch)
    assert _layout(model) == alone
    assert counts == [4]
    assert len(alone.regions) == 4


@pytest.mark.parametrize("mixing", [(0,), (3,), (1, 2)])
def test_a_pair_that_is_wrong_leaves_the_others_right(monkeypatch: pytest.MonkeyPatch, mixing: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Stages(*mixing)
    alone = _layout(model)
    counts = _together(monkeypatch)
    assert _layout(model) == alone
    assert counts == [4, 2, 2]
    paired = {name for region in alone.regions if not region.is_apart for name in region.cuts}
    assert all((f"up.{place}.weight" in paired) is (place not in mixing) for place in range(4))


def test_small_modules_are_proven_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _together(monkeypatch, work=joint_proofs.LARGE_WORK)
    _layout(Stages())
    assert counts == []


def test_what_was_proven_with_a_pair_that_is_not_cut_is_proven_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _together(monkeypatch)
    taken = Search._accept

    def accept(self: Search, region: Region, keys: set[int]) -> None:
        if "up.1.weight" in region.cuts and not region.is_apart:
            self._give_up(keys, "for this test")
        else:
            taken(self, region, keys)

    monkeypatch.setattr(Search, "_accept", accept)
    layout = _layout(Stages())
    assert counts == [4, 3]
    assert sum(not region.is_apart for region in layout.regions) == 3


def test_what_is_wrong_without_such_a_pair_is_not_cut() -> None:
    one, two, three = (Region(scope="", num_units=2, cuts={}, roles={name: "row"}) for name in ("one", "two", "three"))

    def prove(_: str, regions: list[Region]) -> bool:
        if regions == [one, two]:
            raise joint_proofs.DisprovedError("these two are wrong")
        if regions == [two]:
            raise joint_proofs.DisprovedError("this one is wrong")
        return True

    groups = joint_proofs.Together(prove)
    groups.prove("", [one, two, three])
    assert groups.disproved([one, two, three]) == []
    assert groups.disproved([one, two]) == [(two, "this one is wrong")]


class Inside(nn.Module):
    """A module whose first layer takes what an outer one gives, and is the row of a pair with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 12), nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).tanh()).tanh()


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(8, 16), Inside()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.before(x).tanh())


def test_no_pair_is_tried_in_a_module_that_shards_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_proofs(monkeypatch)
    layout = _layout(Outside())
    assert counts[""] == 1
    assert counts["inside"] == 0
    assert {"before.weight", "inside.first.weight"} <= layout.cuts.keys()
    assert "would enter it" in layout.alone["inside.second.weight"]
