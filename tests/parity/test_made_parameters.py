"""Parameters that a first forward makes: no optimizer trains them, which is told; the fix works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity.jobs import made_parameters_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

PLANS = ["single", "dp=2", "tp=2", "pp=2,micro_batches=2", "dp=2,tp=2"]


@pytest.mark.parametrize("line", PLANS)
@pytest.mark.parametrize("run", [jobs.run_fresh, jobs.run_replacing])
def test_a_parameter_that_the_first_forward_makes_is_refused(run: Any, line: str) -> None:
    for outcome in testing.run_outcomes(run, mw.Plan.parse(line).num_ranks, line):
        assert isinstance(outcome.error, mw.errors.ApplyError)
        assert "apply_plan" in str(outcome.error)


@pytest.mark.parametrize("line", ["dp=2", "tp=2", "pp=2,micro_batches=2"])
def test_another_name_of_a_layer_is_not_called_a_new_parameter(line: str) -> None:
    """Pipelines said that no optimizer would train it."""
    for outcome in testing.run_outcomes(jobs.run_renaming, mw.Plan.parse(line).num_ranks, line):
        assert "children" in str(outcome.error)


@pytest.mark.parametrize("line", PLANS)
def test_one_that_is_made_before_is_trained(line: str) -> None:
    model = jobs.build(runs_once=True)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        loss = jobs.squares(model(**jobs.batch(step)), None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, state in testing.run_ranks(jobs.run_once, mw.Plan.parse(line).num_ranks, line):
        assert found == pytest.approx(losses, rel=FLOAT64)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=FLOAT64, atol=1e-13)
