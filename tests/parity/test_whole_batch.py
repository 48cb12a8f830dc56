"""Plans with batch=whole: models whose samples see one another have one device's numbers under dp and ZeRO."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.jobs import whole_batch_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

PLANS = ["dp=2", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=0", "dp=2,tp=2", "dp=2,pp=2"]

plainly = functools.cache(jobs.plainly)


def run(kind: str, line: str, *more: Any) -> list[dict[str, Any]]:
    return testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, kind, line, *more)


def assert_one_device_s(found: dict[str, Any], kind: str, first: int = 0) -> None:
    losses, gradients, state = plainly(kind)
    assert found["losses"] == pytest.approx(losses[first:], rel=FLOAT64)
    for own, wanted in zip(found["gradients"], gradients[first:], strict=True):
        for name, gradient in wanted.items():
            torch.testing.assert_close(own[name], gradient, rtol=FLOAT64, atol=1e-13)
    for name, value in state.items():
        torch.testing.assert_close(found["state"][name], value, rtol=FLOAT64, atol=1e-13)


@pytest.mark.parametrize("kind", ["Contrast", "Centred"])
@pytest.mark.parametrize("line", PLANS)
def test_is_one_device_s(line: str, kind: str) -> None:
    for found in run(kind, f"{line},batch=whole"):
        assert_one_device_s(found, kind)
        assert found["samples"] == [jobs.NUM_SAMPLES] * jobs.STEPS
        assert found["evaluated"]["num_samples"] == jobs.NUM_SAMPLES
        assert found["place"] == (0, 1)
        assert [reason for reason in found["reasons"] if reason.startswith(("batch:", "loss:"))] == [
            f"batch: each of the {line[3]} dp ranks computes all samples of a batch (batch=whole): ZeRO saves memory, and dp "
            "saves no time"
        ]


@pytest.mark.parametrize("loss", ["own_loss", "as_sum"])
def test_a_loss_of_the_user_s_is_one_device_s(loss: str) -> None:
    for found in run("Contrast", "dp=2,zero=2,batch=whole", loss):
        assert_one_device_s(found, "Contrast")


@pytest.mark.parametrize("loop", ["loss", "forward"])
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0", "dp=2,tp=2"])
def test_an_own_loop_is_one_device_s_without_a_weight(line: str, loop: str) -> None:
    for found in run("Contrast", f"{line},batch=whole", "own", loop):
        assert_one_device_s(found, "Contrast")


@pytest.mark.parametrize("kind", ["Contrast", "Centred"])
def test_a_batch_that_is_cut_is_refused_with_it_as_the_fix(kind: str) -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, kind, "dp=2,zero=1,batch=split"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "batch=whole" in str(outcome.error.fix)


def test_micro_batches_cut_it_still() -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, "Contrast", "dp=2,batch=whole,micro_batches=2"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "micro_batches=1" in str(outcome.error.fix)


@pytest.mark.parametrize(("line", "other"), [("dp=2,zero=3,batch=whole", "tp=2"), ("pp=2", "dp=2,zero=1,batch=whole")])
def test_a_checkpoint_goes_on_under_another_plan(line: str, other: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run("Contrast", line, "own", "step", folder)
    for found in run("Contrast", other, "own", "step", folder):
        assert found["samples"] == [jobs.NUM_SAMPLES] * (jobs.STEPS - 1)
        assert_one_device_s(found, "Contrast", first=1)


def test_gathered_rows_are_there_already() -> None:
    wanted = testing.run_ranks(jobs.gathered, 1, "single")[0]
    for loss, gradients in testing.run_ranks(jobs.gathered, 2, "dp=2,zero=3,batch=whole"):
        assert loss == pytest.approx(wanted[0], rel=FLOAT64)
        for name, gradient in wanted[1].items():
            assert (gradient is None) == (gradients[name] is None)
            if gradient is not None:
                torch.testing.assert_close(gradients[name], gradient, rtol=FLOAT64, atol=1e-13)


def test_ranks_with_other_batches_are_refused() -> None:
    for outcome in testing.run_outcomes(jobs.apart, 2, "dp=2,batch=whole"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "ranks [0, 1] take each batch whole" in outcome.error.message


def test_a_parameter_beside_the_model_has_one_device_s_gradient() -> None:
    for loss, gradient in testing.run_ranks(jobs.beside, 2, "dp=2,batch=whole"):
        assert loss == pytest.approx(gradient, rel=FLOAT64)


def test_gradients_that_ranks_do_not_weigh_are_refused() -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, "OwnBackward", "dp=2,batch=whole", "squares"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "runs backward() itself" in outcome.error.message
    for outcome in testing.run_outcomes(jobs.meeting, 2, "dp=2,batch=whole", "dp=2"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "the same dp, tp and batch" in str(outcome.error.fix)
