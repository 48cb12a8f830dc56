"""Layers of other stages whose own checks do not hold on zeros: their results' shapes are found on other values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.walking.shapes import Shapes, make_twins
from meshwright.apply.pipeline.walking.stand_ins import Meta, StageValue, StandIn, mark
from meshwright.apply.pipeline.walking.without_numbers import find_of_function


class Scaled(nn.Module):
    """Divides by the largest entry of a product, and checks that this left numbers, as simulated quantisation does."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        scaled = hidden / hidden.detach().abs().max()
        if bool(scaled.isnan().any()):
            raise AssertionError("NaN")
        centred = scaled - scaled.mean(0)
        if float(centred.detach().abs().max()) <= self.least:  # ones alone do not differ from one sample to the next
            raise ArithmeticError("no spread")
        return centred


def _elsewhere(*shape: int) -> Tensor:
    """Return a tensor that another stage computes."""
    stand_in = StandIn(Meta.of(torch.empty(*shape, requires_grad=True)))
    return mark(stand_in, StageValue(object(), 1, None, stand_in))


def _shapes_of(layer: nn.Module) -> Shapes:
    return Shapes(make_twins(layer, [""]), (), ())


def test_a_layer_that_checks_for_nan_has_a_shape_on_another_stage() -> None:
    layer = Scaled()
    known = _shapes_of(layer).find_of_unit("", layer, Scaled.forward, (_elsewhere(3, 4),), {})
    assert known.results.shape == (3, 6)
    assert known.results.requires_grad


def test_the_error_on_zeros_is_told_where_no_values_serve() -> None:
    layer = Scaled(least=1e9)
    with pytest.raises(AssertionError, match="NaN"):
        _shapes_of(layer).find_of_unit("", layer, Scaled.forward, (_elsewhere(3, 4),), {})


class Cast(nn.Module):
    """Casts its input to the dtype of its first parameter, as models of transformers ask for their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(next(self.parameters()).dtype))


def test_a_layer_that_asks_for_its_own_dtype_has_a_shape_on_another_stage() -> None:
    layer = Cast()
    absent = dict(layer.linear._parameters)
    layer.linear._parameters = {}
    vars(layer.linear).update(absent)  # as on the stages that do not hold them
    known = Shapes({}, (), ()).find_of_unit("", layer, Cast.forward, (_elsewhere(3, 4),), {})
    assert (known.results.shape, known.results.dtype) == ((3, 6), torch.float64)
    assert list(layer.parameters()) == []


def _inverse(matrix: Tensor) -> Tensor:
    if not float(matrix.sum()):
        raise ArithmeticError("zeros")
    return matrix * 2.0


def test_a_function_that_raises_on_zeros_has_a_shape() -> None:
    found, needs_numbers = find_of_function(_inverse, (_elsewhere(3, 4),), {}, 1)
    assert needs_numbers
    assert found.shape == (3, 4)


class Counts(nn.Module):
    """Reads numbers of its values in several ways; `asks` says which."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor, limit: Tensor) -> tuple[Tensor, str]:
        return x, "many" if self._is_many(x, limit) else "few"

    def _is_many(self, x: Tensor, limit: Tensor) -> bool:
        match self.asks:
            case "number":
                return int((x > 0).sum()) > 50
            case "float":
                return x.norm().item() > 1e3
            case "tensor":
                return bool((x > 0).sum() > 50)
            case "list":
                return (x > 0).sum(0).tolist()[0] > 50
            case "written":
                found = torch.zeros(())
                found.add_((x > 0).sum())
                return bool(found > 50)
            case "loop":
                rest, turns = x.abs().sum() / 1e9, 0
                while rest > 1.0:
                    rest, turns = rest / 2, turns + 1
                return turns > 3
            case _:
                return bool(limit.sum() > 50)  # of a tensor that every stage has


@pytest.mark.parametrize(
    ("asks", "kinds"),
    [(asks, {"few", "many"}) for asks in ("number", "float", "tensor", "list", "written", "loop")]
    + [("limit", {"few"})],
)
def test_a_branch_behind_a_threshold_is_tried(asks: str, kinds: set[str]) -> None:
    layer = Counts(asks)
    found, *_ = _shapes_of(layer).guesses("", layer, (_elsewhere(3, 4), torch.ones(3)), {})
    assert {guess.results[1] for guess in found} == kinds
