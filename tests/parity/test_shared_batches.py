"""Batches that ranks share out are one batch: others are refused, roundings and each rank's own data are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.parity.jobs import shared_batches_jobs as jobs

import meshwright as mw
from meshwright import testing


@pytest.mark.parametrize(
    "job",
    [jobs.train_by_sampler, jobs.train_by_stream, jobs.train_on_drawn, jobs.train_by_hand, jobs.evaluate_drawn],
    ids=lambda job: job.__name__,
)
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=1"])
def test_other_batches_on_some_ranks_are_refused(job: Callable[[str], float], plan: str) -> None:
    outcomes = testing.run_outcomes(job, 2, plan)
    for outcome in outcomes:
        assert isinstance(outcome.error, mw.ApplyError)
        assert "different batches to share out" in str(outcome.error)
        assert "batch[0]" in str(outcome.error)
        assert "manual_seed" in str(outcome.error.fix)


def test_roundings_and_batches_that_one_rank_reads_ahead_are_not() -> None:
    first, second = testing.run_ranks(jobs.train_on_rounded, 2, "dp=2")
    assert first == second


def test_data_of_each_ranks_own_is_not_compared() -> None:
    first, second = testing.run_ranks(jobs.train_rank_local, 2, "dp=2")
    assert first == second
