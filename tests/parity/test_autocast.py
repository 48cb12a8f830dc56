"""torch.autocast around a step holds in forward and loss, as in a plain loop, on all ranks or on none."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.parity.jobs import autocast_jobs as jobs

import meshwright as mw
from meshwright import testing

_BFLOAT16 = 2e-2
"""Roundings to bfloat16 of sums over other numbers of samples or columns, relative."""


def test_one_device_has_the_bits_of_a_plain_loop() -> None:
    losses, weight = jobs.planned("single")
    expected_losses, expected = jobs.plain()
    assert losses == expected_losses
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2", "data_parallel"])
def test_it_holds_under_every_plan(line: str) -> None:
    expected_losses, expected = jobs.plain()
    num_ranks = 1 if line == "data_parallel" else 2
    for losses, weight in testing.run_ranks(jobs.planned, num_ranks, line):
        assert losses == pytest.approx(expected_losses, rel=_BFLOAT16)
        torch.testing.assert_close(weight, expected, rtol=_BFLOAT16, atol=1e-3)


@pytest.mark.parametrize(
    ("line", "inside"),
    [("dp=2", False), ("dp=2", True), ("dp=2,zero=3", False), ("dp=2,zero=3", True), ("tp=2", False)],
)
def test_it_is_refused_on_one_rank_alone(line: str, inside: bool) -> None:
    for outcome in testing.run_outcomes(functools.partial(jobs.on_one_rank, line, inside=inside), 2):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert "dtype of torch.autocast" in str(outcome.error) or "torch.bfloat16" in str(outcome.error)
        assert "fix: " in str(outcome.error)


def test_two_precisions_are_refused() -> None:
    with pytest.raises(mw.ApplyError, match=r"torch\.float16"):
        jobs.two_precisions()


def test_a_forward_that_asks_for_the_dtype_is_refused_by_name_where_layers_are_cut() -> None:
    for outcome in testing.run_outcomes(jobs.asking, 2, "tp=2"):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert "without autocast" in str(outcome.error)
        assert "AssertionError: another dtype" in str(outcome.error)
    first, second = testing.run_ranks(jobs.asking, 2, "dp=2")  # the fix
    assert first == second
