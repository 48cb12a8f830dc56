"""Scripts that train copies of the model: one device's where ranks write the same, refused where each writes its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.parity.jobs import copy_training_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

CALLS = [
    ("dp=2", "data", "evaluate"),
    ("dp=2", "copy", "evaluate"),
    ("dp=2", "data", "save"),
    ("dp=2", "copy", "step"),
    ("dp=2,zero=1", "data", "state"),
    ("dp=2,zero=2", "copy", "step"),
    ("dp=2,zero=3,whole_below=1", "data", "state"),
]


@pytest.mark.parametrize(("plan", "writes", "then"), CALLS)
def test_copies_that_ranks_train_on_their_own_shares_are_refused(
    plan: str, writes: str, then: str, tmp_path: Path
) -> None:
    for outcome in testing.run_outcomes(jobs.under_plan, 2, plan, "share", writes, then, str(tmp_path)):
        assert isinstance(outcome.error, mw.ApplyError), f"{outcome.error!r}"
        assert "ranks have other values of 4 parameters" in str(outcome.error)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=1", "tp=2"])
def test_copies_that_are_trained_on_the_whole_batch_are_one_devices(plan: str) -> None:
    wanted = jobs.plain()
    for writes in ("data", "copy"):
        for found in testing.run_ranks(jobs.under_plan, 2, plan, "whole", writes, "evaluate"):
            testing.assert_parity(found, wanted, FLOAT64)
