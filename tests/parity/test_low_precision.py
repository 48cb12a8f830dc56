"""Models in bfloat16 and under autocast: roundings are not refused, and what mixes samples is, as in float32."""

from __future__ import annotations

import pytest
from tests.parity.jobs import low_precision_jobs as jobs

import meshwright as mw
from meshwright import testing

_BFLOAT16 = 1e-2
"""Roundings to bfloat16 of a loss, relative."""


# Refused: gradients of parts "differ" by 0.36 of one by rounding; and labels that count were not told from samples.
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0"])
def test_roundings_of_bfloat16_are_not_refused(line: str) -> None:
    for losses, _ in testing.run_ranks(jobs.planned, 2, "Words", line):
        assert losses == pytest.approx(jobs.plainly("Words"), rel=_BFLOAT16)


def test_samples_that_mix_in_bfloat16_are_refused() -> None:
    for outcome in testing.run_outcomes(jobs.planned, 2, "Mixing", "dp=2,batch=split"):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert "fix: " in str(outcome.error)


# It could not be tried, and counted samples where the loss counts labels.
def test_a_forward_for_autocast_alone_is_tried_under_it() -> None:
    for losses, reasons in testing.run_ranks(jobs.planned, 2, "Asking", "dp=2"):
        assert losses == pytest.approx(jobs.plainly("Asking"), rel=1e-3)
        assert not [text for text in reasons if "could not be tried" in text]


# Ended in torch's DynamicOutputShapeException: autocast kept the weights of a run on shapes alone.
def test_experts_under_autocast_in_a_pipeline() -> None:
    for losses, _ in testing.run_ranks(jobs.planned, 2, "experts", "pp=2"):
        assert losses == pytest.approx(jobs.plainly("experts"), rel=1e-3)


# Autocast kept the weights of the first step: losses of all later ones were the first one's.
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0", "tp=2", "pp=2"])
def test_autocast_around_a_whole_loop(line: str) -> None:
    for losses in testing.run_ranks(jobs.around_a_loop, 2, line):
        assert losses == pytest.approx(jobs.around_each_step(), rel=5e-3)


# Under tp=2 autocast kept a weight whole that was cut then: an AssertionError of torch's about its size.
@pytest.mark.parametrize("line", ["tp=2", "pp=2,micro_batches=2"])
def test_a_forward_that_casts_by_itself_under_another_autocast(line: str) -> None:
    for losses, _ in testing.run_ranks(jobs.planned, 2, "Casting", line):
        assert losses == pytest.approx(jobs.plainly("Casting"), rel=5e-3)
