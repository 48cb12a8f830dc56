"""Numbers that are not finite: found before the optimizer, on every rank, with their place; or skipped without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.harness import cut
from tests.parity.models import small_models as models
from torch import nn

import meshwright as mw
from meshwright import testing


def _rank() -> int:
    return mw.current_world().rank


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _steps_with_nan(policy: str, marked: tuple[int, int], num_ranks: int) -> list[Any]:
    """Three steps; in the second, one sample of the given (rank, micro-batch) makes the loss NaN."""
    plan = mw.Plan.parse(f"dp={num_ranks},micro_batches=2")
    model = mw.apply_plan(
        models.build_mlp, plan, loss_fn=losses.not_finite_where_marked, optimizer=_sgd, non_finite=policy
    )
    try:
        seen = []
        for step in range(3):
            inputs, targets = cases.regression(4 * num_ranks, step)
            if step == 1:
                targets[4 * marked[0] + 2 * marked[1]] = 1e9
            batch = cut((inputs, targets), [4] * num_ranks)[_rank()]
            before = [p.detach().clone() for p in model.module.parameters()]
            error = None
            try:
                result = model.step(batch)
            except mw.NonFiniteError as caught:
                error = caught
                result = None
            same = all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))
            seen.append((error, None if result is None else result.skipped, same))
            if error is not None:
                break
        return seen
    finally:
        model.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_nan_stops_every_rank_before_the_optimizer(num_ranks: int, micro_batch: int) -> None:
    culprit = num_ranks - 1
    for seen in testing.run_ranks(_steps_with_nan, num_ranks, "stop", (culprit, micro_batch), num_ranks):
        assert seen[0] == (None, False, False)
        error, _, unchanged = seen[1]
        assert isinstance(error, mw.NonFiniteError)
        assert (error.rank, error.micro_batch) == (culprit, micro_batch)
        assert unchanged
        assert f"rank {culprit}" in str(error)


def test_nan_skips_the_step_on_every_rank_where_that_is_asked_for() -> None:
    for seen in testing.run_ranks(_steps_with_nan, 2, "skip", (1, 0), 2):
        assert seen == [(None, False, False), (None, True, True), (None, False, False)]


def _skip_with_statistics(name: str, line: str, devices: Any = None) -> list[Any]:
    """A step whose last sample is NaN, under the policy "skip", on a model with running statistics."""
    case = cases.PIECEWISE[name]
    model = mw.apply_plan(
        case.build,
        mw.Plan.parse(line),
        loss_fn=case.loss_fn,
        optimizer=_sgd,
        non_finite="skip",
        devices=devices,
    )
    try:
        model.step(mw.split_batch(case.batch(6, 0), model))
        before = model.full_state_dict()
        inputs, targets = case.batch(6, 1)
        inputs[-1] = torch.nan
        result = model.step(mw.split_batch((inputs, targets), model))
        return [result.skipped, before, model.full_state_dict()]
    finally:
        model.close()


@pytest.mark.parametrize("name", ["batch_norm", "moving_average"])
@pytest.mark.parametrize("line", ["dp=2", "single", "mode=data_parallel,dp=2", "mode=model_parallel,pp=1"])
def test_a_skipped_step_leaves_no_trace_in_buffers(name: str, line: str) -> None:
    devices = None if "mode" not in line else ["cpu"] * mw.Plan.parse(line).num_devices
    results = (
        testing.run_ranks(_skip_with_statistics, 2, name, line)
        if line == "dp=2"
        else [_skip_with_statistics(name, line, devices)]
    )
    for skipped, before, after in results:
        assert skipped
        testing.assert_parity(after, before, 0.0)


class _InfinitePart(nn.Module):
    """The loss is finite, one parameter's gradient is not: the square root has an infinite slope at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 5)
        self.steep = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.steep.abs().sqrt() if x.abs().max() > 50 else self.body(x) + self.steep


def _build_infinite_part() -> nn.Module:
    return _InfinitePart().double()


def _step_to_infinity() -> None:
    model = mw.apply_plan(_build_infinite_part, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=_sgd)
    try:
        inputs, targets = cases.regression(4, 0)
        inputs[3] = 100.0
        with torch.no_grad():
            model.module.steep.zero_()
        model.step(mw.split_batch((inputs, targets), model))
    finally:
        model.close()


def test_a_gradient_that_is_not_finite_names_its_parameter() -> None:
    outcomes = testing.run_outcomes(_step_to_infinity, 2)
    errors = [outcome.error for outcome in outcomes]
    assert [(e.rank, e.parameter) for e in errors if isinstance(e, mw.NonFiniteError)] == [(1, "steep")] * 2
