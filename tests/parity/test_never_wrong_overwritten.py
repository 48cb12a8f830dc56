"""Parameters that a script writes over or that a loss reads: equal, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity.jobs import overwritten_jobs as jobs

import meshwright as mw
from meshwright import testing

WRITES = [
    jobs.write_all,
    jobs.write_one,
    jobs.write_entry,
    jobs.write_scale,
    jobs.write_moved,
    jobs.write_computed,
    jobs.write_cast,
]


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("write", WRITES)
def test_parameters_that_are_sharded_are_not_written_over(write: Any, after: int) -> None:
    plan = "dp=2,zero=3,whole_below=0"
    for outcome in testing.run_outcomes(jobs.written, 2, plan, write, False, after):
        assert isinstance(outcome.error, mw.ApplyError), f"{outcome.error!r} {outcome.result!r}"
        assert "whole_parameters" in str(outcome.error)
    for found in testing.run_ranks(functools.partial(jobs.written, plan, write, True, after), 2):
        equal(found, jobs.plainly_written(write, after))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=0"])
def test_sentinels_take_what_was_written_while_parameters_were_whole(plan: str) -> None:
    expected = testing.run_ranks(jobs.written_before_sentinels, 1, "single")[0]
    for found in testing.run_ranks(jobs.written_before_sentinels, 2, plan):
        equal(found, expected)


@pytest.mark.parametrize("kind", ["norm", "data", "teacher", "moved"])
def test_a_forward_does_not_write_into_parameters_that_are_gathered(kind: str) -> None:
    for outcome in testing.run_outcomes(jobs.written_in_forward, 2, "dp=2,zero=3,whole_below=0", kind):
        assert isinstance(outcome.error, mw.ApplyError), f"{outcome.error!r}"
        assert "was written over in a forward" in str(outcome.error)


@pytest.mark.parametrize("kind", ["squares", "orthogonal", "one"])
@pytest.mark.parametrize("plan", ["data_parallel,dp=2", "data_parallel,dp=3,micro_batches=2"])
def test_replicas_add_what_a_penalty_over_parameters_gives(plan: str, kind: str) -> None:
    losses, found = jobs.penalized(plan, kind)
    expected_losses, expected = jobs.penalized(None, kind)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    equal(found, expected)


def test_replicas_refuse_a_hook_that_was_called_with_a_part() -> None:
    module, loss_fn = jobs.build(), jobs.Penalized("squares")
    loss_fn.module = module
    module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    plan, devices = "data_parallel,dp=2", ["cpu"] * 2
    model = mw.apply_plan(module, plan, loss_fn=loss_fn, optimizer=jobs.Sgd, devices=devices)
    with model, pytest.raises(mw.ApplyError, match="was called with a part of it"):
        model.step(jobs.batches()[0])
