"""Differences of two sets of tensors, and what roundings explain: what looks small beside another tensor is not equal by that."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from meshwright.measure.oracle import StepRecord
from meshwright.measure.parity import compare_tensors
from meshwright.measure.resolution import NumericResolution
from meshwright.measure.verdict import judge

BOUND = 1e-11


def difference(candidate: Tensor, reference: Tensor, **beside: Tensor) -> float:
    rows = compare_tensors({"a": candidate, **beside}, {"a": reference, **beside})
    return rows[0].relative


def test_an_infinite_mask_hides_no_difference() -> None:
    # Beside a mask of -inf every difference of another buffer was 0.
    mask = torch.full((3, 3), -math.inf, dtype=torch.float64).triu(1)
    one = torch.ones(4, dtype=torch.float64)
    assert difference(2 * one, one, mask=mask) == 1.0
    assert difference(mask, mask.clone()) == 0.0
    other = mask.clone()
    other[2, 0] = 0.5
    assert difference(other, mask) == math.inf  # 0 beside infinities, which are no scale
    part = torch.tensor([-math.inf, 1.0, 2.0])
    assert difference(torch.tensor([-math.inf, 1.5, 2.0]), part) == 0.25
    assert difference(torch.tensor([3.0, 1.0, 2.0]), part) == math.inf
    assert difference(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0])) == 0.0


def test_integers_are_equal_or_not() -> None:
    big = torch.tensor([2**60, 5])
    assert difference(big + 1, big) == 1.0  # equal as float64
    assert difference(torch.tensor([2**40 + 1]), torch.tensor([2**40])) == 1.0  # within a bound of 1e-11
    assert difference(torch.tensor([3]), torch.tensor([1])) == 2.0
    assert difference(torch.tensor([True]), torch.tensor([False])) == math.inf
    assert difference(big, big.clone()) == 0.0
    one = torch.ones(4, dtype=torch.float64)
    assert difference(2 * one, one, ids=big) == 1.0  # nor do large ones make others small


@pytest.mark.parametrize("kind", ["gradients", "buffers"])
@pytest.mark.parametrize(("moved", "is_equal"), [(1e-33, False), (3e-18, True)])
def test_what_is_small_beside_others_is_equal_only_where_roundings_make_it(
    kind: str, moved: float, *, is_equal: bool
) -> None:
    large, small = torch.ones(3, dtype=torch.float64), torch.full((2,), 1e-17, dtype=torch.float64)
    values = {"large": large, "small": small}
    record = StepRecord(loss=1.0, grad_norm=1.0, gradients=dict(values), parameters=dict(values), buffers=dict(values))
    wrong = dataclasses.replace(record, **{kind: {"large": large, "small": 2 * small}})
    report = judge(
        [wrong],
        [record],
        NumericResolution(bound=BOUND),
        plan="dp=2",
        dtype=torch.float64,
        moves=lambda: {(0, word, name): moved for word in ("gradient", "value", "buffer") for name in values},
    )
    assert report.equal is is_equal
    if kind == "gradients" and not is_equal:
        assert report.first_difference is not None
        assert (report.first_difference.name, report.first_difference.gradient) == ("small", 1.0)


def test_roundings_are_not_asked_for_where_nothing_is_small() -> None:
    values = {"a": torch.ones(3, dtype=torch.float64)}
    record = StepRecord(loss=1.0, grad_norm=1.0, gradients=dict(values), parameters=dict(values), buffers={})
    wrong = dataclasses.replace(record, gradients={"a": 2 * values["a"]})

    def moves() -> dict[tuple[int, str, str], float]:
        raise AssertionError("a run for nothing")

    for got, is_equal in ((record, True), (wrong, False)):
        report = judge([got], [record], NumericResolution(bound=BOUND), plan="dp=2", dtype=torch.float64, moves=moves)
        assert report.equal is is_equal
