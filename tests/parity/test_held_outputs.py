"""Outputs of a pipeline that come of parameters alone: every rank has them, whichever stage holds the parameter."""

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
