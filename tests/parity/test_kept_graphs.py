"""Graphs from before a plan: autograd's nodes know parameters by the shapes that they had."""

from __future__ import annotations

import pytest
from tests.parity.jobs import kept_graphs_jobs as jobs

import meshwright as mw
from meshwright import testing


@pytest.mark.parametrize("line", ["tp=2", "dp=2,tp=2", "dp=2,zero=3,whole_below=0", "pp=2,micro_batches=2"])
def test_a_model_that_was_run_before_the_plan_trains(line: str) -> None:
    losses, state = jobs.train("single")
    for found, values in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, line):
        assert found == pytest.approx(losses, rel=1e-11)
        testing.assert_parity(values, state, 1e-11)
