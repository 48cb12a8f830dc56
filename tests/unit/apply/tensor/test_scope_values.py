"""Values with which scopes are tried: drawn once for scopes of the same shapes; results are let go and computed again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.apply.tensor.tensor_type_cases import PAIR, Between
from torch import Tensor, nn

from meshwright.apply.tensor.cutting import Cutting
from meshwright.apply.tensor.proof import proof, scope_values
from meshwright.apply.tensor.proof.conditions import Conditions
from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.proof.scope_values import LastDrawn, ScopeValues
from meshwright.apply.tensor.proof.shards_against_whole import (
    DisprovedError,
    check_equal,
    check_gradient,
    check_shards,
    furthest,
)
from meshwright.apply.tensor.search.trace import Call
from meshwright.layout import ShardLayout


def call() -> Call:
    return Call(args=(torch.randn(4, 6, dtype=torch.float64, requires_grad=True),), kwargs={})


def call_of_many() -> Call:
    return Call(args=(torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True),), kwargs={})


def pair() -> nn.Module:
    return Between(lambda _, h: h.relu()).double()


def memory_of(values: ScopeValues) -> list[int]:
    return [parameter.data_ptr() for parameter in values.fresh().parameters()]


def test_scopes_of_the_same_shapes_share_what_was_drawn() -> None:
    last = LastDrawn()
    first, second = ScopeValues(nn.Linear(3, 4), last), ScopeValues(nn.Linear(3, 4), last)
    assert memory_of(first) == memory_of(second)
    assert memory_of(ScopeValues(nn.Linear(4, 3), last)) != memory_of(first)


def test_what_a_run_wrote_is_drawn_anew() -> None:
    last = LastDrawn()
    values = ScopeValues(nn.Linear(3, 4), last)
    expected = [parameter.detach().clone() for parameter in values.fresh().parameters()]
    with torch.no_grad():
        next(iter(values.fresh().parameters())).add_(1.0)
    assert values.were_written()
    for found in (values.fresh(), ScopeValues(nn.Linear(3, 4), last).fresh()):
        assert all(torch.equal(mine, other) for mine, other in zip(found.parameters(), expected, strict=True))


def test_what_a_run_wrote_before_it_raised_is_drawn_anew() -> None:
    # Zeros, for one, would let anything pass.
    last = LastDrawn()
    values = ScopeValues(nn.Linear(3, 4), last)
    expected = [parameter.detach().clone() for parameter in values.fresh().parameters()]
    with torch.no_grad():
        next(iter(values.fresh().parameters())).zero_()
    found = ScopeValues(nn.Linear(3, 4), last).fresh()
    assert all(torch.equal(mine, other) for mine, other in zip(found.parameters(), expected, strict=True))


def test_parameters_that_are_whole_numbers_keep_their_own() -> None:
    class Table(nn.Module):
        def __init__(self, start: int) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.arange(start, start + 3), requires_grad=False)

    last = LastDrawn()
    for start in (0, 5):
        (found,) = ScopeValues(Table(start), last).fresh().parameters()
        assert found.tolist() == list(range(start, start + 3))


def test_results_that_were_let_go_come_again_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope_values, "_LARGE", 0)
    experiment = Experiment(pair(), call(), 2)
    before = experiment.whole
    proven = experiment.prove(PAIR)
    experiment.forget()
    assert experiment.prove(PAIR) == proven
    after = experiment.whole
    assert after is not before
    there = {name: gradient for name, gradient in before.gradients.items() if gradient is not None}
    assert there
    for name, gradient in there.items():
        other = after.gradients[name]
        assert other is not None
        assert torch.equal(gradient, other)


@pytest.mark.parametrize("large", [True, False])
def test_conditions_hold_the_results_of_no_large_scope(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    monkeypatch.setattr(scope_values, "_LARGE", 0 if large else 10**9)
    conditions = Conditions(pair(), [call(), call()], 2)
    proven = conditions.prove(PAIR)
    held = [experiment._whole is not None for experiment in conditions._made]
    assert held == [not large] * 4  # two calls, in two modes
    assert conditions.prove(PAIR) == proven


@pytest.mark.parametrize("is_right", [True, False])
def test_shards_and_their_gradients_are_gone_after_a_proof(monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    # Modules refer to themselves: until the collector comes, their tensors would stay.
    made: list[Cutting] = []

    class Kept(Cutting):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(proof, "Cutting", Kept)
    module = pair() if is_right else Between(lambda _, h: h.softmax(-1)).double()
    experiment = Experiment(module, call(), 2)
    if is_right:
        experiment.prove(PAIR)
    else:
        with pytest.raises(DisprovedError):
            experiment.prove(PAIR)
    assert len(made) == 2
    for cutting in made:
        assert [cutting.module.get_parameter(name).numel() for name in PAIR.cuts] == [0] * len(PAIR.cuts)
        assert all(parameter.grad is None for parameter in cutting.module.parameters())


def test_what_is_written_into_shards_reaches_no_other_run() -> None:
    # Shards lie in the memory of the values where they are one block of it, and torch counts such a write for the shard alone.
    def function(module: Any, hidden: Tensor) -> Tensor:
        if module.up.weight.shape[0] < PAIR.num_units:
            with torch.no_grad():
                module.up.weight.zero_()
        return hidden.relu()

    last = LastDrawn()
    module = Between(function).double()
    values, others = ScopeValues(module, last), ScopeValues(Between(function).double(), last)
    expected = [parameter.detach().clone() for parameter in others.fresh().parameters()]
    with pytest.raises(DisprovedError):
        Experiment(module, call(), 2, values=values).prove(PAIR)
    assert others.were_written()
    for found in (values.fresh(), others.fresh(), ScopeValues(module, last).fresh()):
        assert all(torch.equal(mine, other) for mine, other in zip(found.parameters(), expected, strict=True))


def test_shards_are_gone_where_a_run_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Cutting] = []
    dropped = Cutting.drop_values
    monkeypatch.setattr(Cutting, "drop_values", lambda self: (made.append(self), dropped(self)))
    with pytest.raises(DisprovedError, match="on shards"):
        Experiment(Between(lambda _, h: h.view(2, 4, 8)).double(), call_of_many(), 2).prove(PAIR)
    assert made
    assert all(cutting.module.get_parameter(name).numel() == 0 for cutting in made for name in PAIR.cuts)


# -- shards beside the whole ------------------------------------------------------------------------------------------


def shards_of(whole: Tensor, layouts: list[ShardLayout]) -> list[Tensor]:
    return [
        torch.cat(
            [whole.narrow(layout.dim or 0, start, stop - start) for start, stop in layout.ranges], layout.dim or 0
        )
        for layout in layouts
    ]


@pytest.mark.parametrize(("dim", "groups"), [(0, (6,)), (0, (4, 2)), (1, (8,)), (1, (4, 4))])
@pytest.mark.parametrize("where", [0, 1])
def test_one_entry_of_a_shard_that_is_off_is_found(dim: int, groups: tuple[int, ...], where: int) -> None:
    whole = torch.randn(6, 8, dtype=torch.float64)
    layouts = [ShardLayout.cut((6, 8), dim, groups, num_parts=2, part=part) for part in range(2)]
    shards = shards_of(whole, layouts)
    size = whole.abs().max().item()
    check_shards(shards, layouts, whole, "it", size, check=check_gradient)
    shards[where].view(-1)[-1] += 1e-8
    with pytest.raises(DisprovedError, match="the gradient of it differs by"):
        check_shards(shards, layouts, whole, "it", size, check=check_gradient)


def test_shards_without_a_gradient_are_zeros_beside_others() -> None:
    layouts = [ShardLayout.cut((4, 2), 0, (4,), num_parts=2, part=part) for part in range(2)]
    whole = torch.ones(4, 2, dtype=torch.float64)
    whole[2:] = 0.0
    check_shards([whole[:2], None], layouts, whole, "it", 1.0, check=check_gradient)
    check_shards([None, None], layouts, None, "it", 1.0, check=check_gradient)
    for shards, expected in (([None, whole[2:]], whole), ([None, None], whole), ([whole[:2], None], None)):
        with pytest.raises(DisprovedError):
            check_shards(shards, layouts, expected, "it", 1.0, check=check_gradient)


def test_entries_beside_an_infinite_one_are_compared() -> None:
    layouts = [ShardLayout.cut((4,), 0, (4,), num_parts=2, part=part) for part in range(2)]
    whole = torch.tensor([-math.inf, 1.0, 2.0, 3.0], dtype=torch.float64)
    shards = shards_of(whole, layouts)
    check_shards(shards, layouts, whole, "it", math.inf, check=check_equal)
    for where, entry in ((1, 0), (0, 0)):
        wrong = [shard.clone() for shard in shards]
        wrong[where][entry] = 5.0
        with pytest.raises(DisprovedError):
            check_shards(wrong, layouts, whole, "it", math.inf, check=check_equal)


def test_shards_of_a_tensor_that_became_larger_are_refused() -> None:
    layouts = [ShardLayout.cut((4,), 0, (4,), num_parts=2, part=part) for part in range(2)]
    whole = torch.arange(6.0, dtype=torch.float64)
    for shards in (list(whole[:4].chunk(2)), list(whole.chunk(2))):
        with pytest.raises(DisprovedError, match=r"it is of shape \[6\] of the whole, and \[4\] is cut"):
            check_shards(shards, layouts, whole, "it", 5.0, check=check_equal)


class _UnitGradient(torch.autograd.Function):
    """The identity, whose gradient is divided by the norm of all its entries."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].norm()


def test_an_infinite_gradient_hides_no_other() -> None:
    class Steep(Between):
        """Between, and a parameter whose gradient is infinite: that of a root at zero."""

        def __init__(self) -> None:
            super().__init__(lambda _, h: _UnitGradient.apply(h.relu()))
            self.steep = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.steep - self.steep.detach()).sqrt()

    with pytest.raises(DisprovedError, match="the gradient of"):
        Experiment(Steep().double(), call(), 2).prove(PAIR)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("shape", [(2**18,), (3, 2**17), (2**17, 3), ()])
def test_the_furthest_entry_is_found_in_every_block(shape: tuple[int, ...], place: int) -> None:
    whole = torch.randn(shape, dtype=torch.float64)
    mine = whole.clone()
    mine.view(-1)[place] += 0.5
    assert furthest(mine, whole) == pytest.approx(0.5)
    mine.view(-1)[place] = float("nan")
    assert furthest(mine, whole) != furthest(mine, whole)
