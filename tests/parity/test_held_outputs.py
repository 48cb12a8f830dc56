"""Outputs that come of parameters alone, or are parameters: every rank has them, whoever holds the parameter."""

from __future__ import annotations

import pytest
import torch
from tests.parity.jobs import held_output_jobs as jobs
from tests.tolerances import FLOAT64

from meshwright import testing
from meshwright.spec import Plan


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,micro_batches=2", "pp=2,micro_batches=2,schedule=zbv", "tp=2,pp=2"])
def test_a_number_of_a_parameter_is_an_output_on_every_rank(plan: str) -> None:
    outputs, losses = jobs.outputs_and_losses("single")
    for found, told in testing.run_ranks(jobs.outputs_and_losses, Plan.parse(plan).num_ranks, plan):
        assert told == pytest.approx(losses, rel=FLOAT64)
        for mine, right in zip(found, outputs, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("plan", ["dp=2,zero=3,whole_below=0", "dp=2", "tp=2,dp=2,zero=3,whole_below=0"])
def test_a_parameter_that_a_model_returns_has_its_values_in_an_own_loop(plan: str) -> None:
    losses = jobs.own_losses("single")
    for found in testing.run_ranks(jobs.own_losses, Plan.parse(plan).num_ranks, plan):
        assert found == pytest.approx(losses, rel=FLOAT64)


@pytest.mark.parametrize("plan", ["dp=2,zero=3,whole_below=0", "dp=2"])
def test_a_loss_of_a_returned_parameter_is_tried_and_refused_where_it_compares_samples(plan: str) -> None:
    for found in testing.run_ranks(jobs.comparing_losses, 2, f"{plan},batch=split"):
        assert "is not a mean over samples" in found


@pytest.mark.parametrize("plan", ["dp=2,zero=3,whole_below=0", "dp=2"])
def test_a_parameter_with_as_many_entries_as_samples_is_no_row_of_each(plan: str) -> None:
    losses = jobs.weighed_losses("single")
    for found in testing.run_ranks(jobs.weighed_losses, 2, plan):
        assert found == pytest.approx(losses, rel=FLOAT64)
