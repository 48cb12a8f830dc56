"""A forward or a loss that runs backward into parameters by itself is refused where a plan adds up gradients."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.parity.jobs import own_backward_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

PLANS = ["dp=2", "dp=2,zero=2", "dp=2,zero=3,whole_below=0", "tp=2", "single,micro_batches=2", "data_parallel,dp=2"]
plainly = functools.cache(jobs.plainly)


def assert_equal(found: dict[str, torch.Tensor], kind: str) -> None:
    for name, value in plainly(kind).items():
        torch.testing.assert_close(found[name], value, rtol=FLOAT64, atol=1e-13)


@pytest.mark.parametrize("kind", ["WithGraph", "Enabled", "Named", "Repeated", "Late", "InHook"])
@pytest.mark.parametrize("line", PLANS)
def test_it_is_refused(line: str, kind: str) -> None:
    # Added up over ranks and parts, it trained other parameters without a word: 0.05 to 0.11 after two steps.
    outcomes = testing.run_outcomes(jobs.train, mw.Plan.parse(line).num_ranks, kind, line)
    errors = [outcome.error for outcome in outcomes]
    assert all(errors), errors
    own = [error for error in errors if isinstance(error, mw.ApplyError) and "runs backward() itself" in error.message]
    assert own or any("runs backward() itself" in str(error) for error in errors)
    assert all("'single'" in str(error.fix) for error in own)


@pytest.mark.parametrize("kind", ["WithGraph", "Enabled"])
def test_so_it_is_in_an_own_loop(kind: str) -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, kind, "dp=2", "own"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "runs backward() itself" in outcome.error.message


@pytest.mark.parametrize("kind", list(jobs.KINDS))
@pytest.mark.parametrize("loop", ["step", "own"])
def test_on_one_device_it_is_torch_s(loop: str, kind: str) -> None:
    assert_equal(testing.run_ranks(jobs.train, 1, kind, "single", loop)[0], kind)


@pytest.mark.parametrize("kind", ["OfInputs", "Reversible"])
@pytest.mark.parametrize("line", ["dp=2", "single,micro_batches=2"])
def test_one_that_adds_to_no_parameter_is_left_alone(line: str, kind: str) -> None:
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, kind, line):
        assert_equal(found, kind)
