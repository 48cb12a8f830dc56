"""Parameters that a forward sets: equal to one device, or refused by name before the first step."""

from __future__ import annotations

import pytest
from tests.parity.jobs import first_batch_jobs as jobs

import meshwright as mw
from meshwright import testing


@pytest.mark.parametrize("kind", ["python", "buffer"])
@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_parameters_that_the_first_batch_sets_are_one_devices(plan: str, kind: str) -> None:
    for losses in testing.run_ranks(jobs.trained, 2, plan, kind):
        assert losses == pytest.approx(jobs.plainly(kind), rel=1e-11)


@pytest.mark.parametrize("kind", ["python", "buffer"])
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "tp=2,micro_batches=2", "pp=2,micro_batches=2"])
def test_parameters_that_parts_of_the_first_batch_would_set_are_refused(plan: str, kind: str) -> None:
    for outcome in testing.run_outcomes(jobs.trained, 2, plan, kind):
        assert isinstance(outcome.error, mw.ApplyError), repr(outcome.error)
        assert "sets its parameter 'norms.0." in outcome.error.message
        assert "before apply_plan" in (outcome.error.fix or "")


@pytest.mark.parametrize("plan", ["single,micro_batches=2", "dp=2", "dp=2,zero=2", "tp=2,micro_batches=2"])
def test_parameters_that_are_set_whatever_the_batch_is_are_not_refused(plan: str) -> None:
    num_ranks = 1 if plan.startswith("single") else 2
    for losses in testing.run_ranks(jobs.trained, num_ranks, plan, "unit"):
        assert losses == pytest.approx(jobs.plainly("unit"), rel=1e-11)
