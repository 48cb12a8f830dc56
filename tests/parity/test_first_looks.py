"""First batches that show little: buffers that count in eval mode, a Loss whose samples see one another, batches that fail."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity.jobs import first_look_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

PLANS = ["dp=2", "dp=2,zero=3,whole_below=0", "pp=2,micro_batches=2", "dp=2,pp=2,micro_batches=2"]

plainly = functools.cache(jobs.plainly)


def assert_one_device_s(found: dict[str, Any]) -> None:
    losses, parameters = plainly()
    assert found["losses"] == pytest.approx(losses, rel=FLOAT64)
    for name, value in parameters.items():
        torch.testing.assert_close(found["state"][name], value.detach(), rtol=FLOAT64, atol=1e-13)


def run(line: str, *given: Any) -> list[Any]:
    return testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, line, *given)


@pytest.mark.parametrize("writes", ["count", "average"])
@pytest.mark.parametrize("line", PLANS)
def test_a_buffer_that_is_written_in_eval_mode_too_hides_nothing(line: str, writes: str) -> None:
    for found in run(line, writes):
        assert_one_device_s(found)
        assert any("what loss_fn returned is not a mean over samples" in reason for reason in found["reasons"])


@pytest.mark.parametrize("line", PLANS)
def test_a_loss_whose_samples_see_one_another_is_joined(line: str) -> None:
    for found in run(line, "", "sum"):
        assert_one_device_s(found)
        assert any("samples of a batch see one another" in reason for reason in found["reasons"])


@pytest.mark.parametrize("line", ["dp=2,batch=split", "dp=2,micro_batches=2"])
def test_such_a_loss_is_told_where_the_plan_cuts_the_batch(line: str) -> None:
    first, second = run(line, "", "sum")
    assert first["losses"] == second["losses"]
    assert first["losses"] != pytest.approx(plainly()[0], rel=1e-3)
    assert any("samples of a batch see one another" in reason for reason in first["reasons"])
    assert any("micro_batches=1, and batch=whole or dp=1" in text for text in first["told"])


@pytest.mark.parametrize("first", ["none", "word", "key", "evaluated"])
@pytest.mark.parametrize("line", PLANS)
def test_a_first_batch_that_no_step_can_take_settles_nothing(line: str, first: str) -> None:
    for found in run(line, "", "mean", first):
        assert found["raised"]
        assert_one_device_s(found)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=2", "dp=2,zero=3,whole_below=0", "tp=2", "pp=2,micro_batches=2"])
def test_batches_that_raise_on_every_rank_leave_nothing(line: str) -> None:
    for found in testing.run_ranks(jobs.fails_late, 2, line):
        assert_one_device_s(found)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0", "dp=2,tp=2", "pp=2,micro_batches=2"])
def test_samples_that_see_one_another_in_eval_mode_are_seen_in_an_evaluation_before_the_first_step(line: str) -> None:
    num_ranks = mw.Plan.parse(line).num_ranks
    for outcome in testing.run_outcomes(jobs.evaluate_first, num_ranks, line, "centres"):
        assert isinstance(outcome.error, mw.ApplyError), outcome.result
        assert "mixes the samples of a batch" in str(outcome.error)
    (alone,) = testing.run_ranks(jobs.evaluate_first, 1, "single", "")
    assert testing.run_ranks(jobs.evaluate_first, num_ranks, line, "") == pytest.approx(
        [alone] * num_ranks, rel=FLOAT64
    )
