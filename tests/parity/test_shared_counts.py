"""What layers count in attributes, and others read: equal under a pipeline, or refused by name before the first step."""

from __future__ import annotations

import pytest
import torch
from tests.parity.jobs import never_wrong_pipeline_jobs as scripts
from tests.parity.jobs import shared_count_jobs as jobs

import meshwright as mw
from meshwright import testing

_EQUAL = ("near", "neighbour", "unread", "own", "cached")


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,schedule=zbv"])
@pytest.mark.parametrize("name", _EQUAL)
def test_layers_that_read_the_count_of_others_stay_on_one_stage(name: str, plan: str) -> None:
    expected = jobs.run_plain(name, False, scripts.MICRO_BATCHES)
    for losses in testing.run_ranks(jobs.run_planned, 2, name, plan, False):
        torch.testing.assert_close(losses, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", [name for name in jobs.MODELS if name not in _EQUAL])
def test_counts_that_would_have_to_travel_are_refused_by_name(name: str, evaluates: bool) -> None:
    outcomes = testing.run_outcomes(jobs.run_planned, 2, name, "pp=2", evaluates)
    assert all(isinstance(outcome.error, mw.ApplyError) for outcome in outcomes)
    key = "log" if name == "list" else "calls"
    assert all(f"{key}' of" in str(outcome.error) and "uses as well" in str(outcome.error) for outcome in outcomes)
