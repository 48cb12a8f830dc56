"""Costs of functions, calls and runs of memory from what a probe measured, and of a model's described calls."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.measure.probe_functions import FUNCTIONS
from meshwright.plan.costs.machine import Machine
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_costs import StepCosts
from unit.plan.ideal import ideal_with
from unit.plan.measured_host import TRAIN, host


def _described() -> mw.ModelSpec:
    return mw.describe_model(lambda: nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)), torch.zeros(4, 8))


def test_a_function_takes_its_own_multiple_of_its_traffic() -> None:
    model = _described()
    assert [operator.function for layer in model.layers for operator in layer.operators] == ["", "silu", ""]
    plan = mw.Plan.parse("single")
    plain, other = (
        mw.predict_plan(model, host(functions=functions), TRAIN, plan).time for functions in ({}, {"silu": (3.0, 5.0)})
    )
    traffic_s = 8 * 2 * 8 * 4 / 2e10  # 8 samples of 8 elements, read and written
    assert other.forward_s - plain.forward_s == pytest.approx(2 * traffic_s)
    assert other.backward_s - plain.backward_s == pytest.approx(4 * 1.5 * traffic_s)


def test_the_host_takes_its_time_for_each_call_that_was_counted() -> None:
    model, plan = _described(), mw.Plan.parse("single")
    issued = [layer.host for layer in model.layers]
    assert [(calls.operators, calls.differentiated) for calls in issued if calls] == [(1, 1), (1, 1), (1, 1)]
    host_s = {"operator": (1e-3, 2e-3), "view": (1e-5, 3e-5), "module": (1e-7, 0.0)}
    plain, other = (
        mw.predict_plan(model, host(host=kinds, operator_s=1.0), TRAIN, plan).time for kinds in ({}, host_s)
    )
    assert plain.forward_s == pytest.approx(3.0)
    assert other.forward_s == pytest.approx(
        3e-3 + 2e-5 + 4e-7, rel=1e-4
    )  # a weight's transpose each; and the model itself
    assert other.backward_s == pytest.approx(6e-3 + 6e-5, rel=1e-4)
    with pytest.raises(ConfigError, match=r"host\['kernel'\]"):
        host(host={"kernel": (1.0, 1.0)})


def test_threads_of_one_process_issue_in_turns() -> None:
    model, calls = _described(), {"operator": (1e-3, 2e-3)}
    plan = mw.Plan.preset("data_parallel", 2)
    together, apart = (
        mw.predict_plan(model, host(host=calls), TRAIN, one).time for one in (plan, mw.Plan.parse("dp=2"))
    )
    assert together.forward_s == pytest.approx(2 * apart.forward_s, rel=1e-3)
    assert together.backward_s == pytest.approx(apart.backward_s)


def test_runs_of_memory_take_their_time() -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[..., :4] * x[..., 4:]

    model, plan = mw.describe_model(lambda: nn.Sequential(nn.Linear(8, 8), Half()), torch.zeros(4, 3, 8)), "single"
    plain, other = (mw.predict_plan(model, host(run_s=each), TRAIN, mw.Plan.parse(plan)).time for each in (0.0, 1e-6))
    assert other.forward_s - plain.forward_s == pytest.approx(8 * 3 * 1e-6)  # of 8 samples, 3 rows each
    assert other.backward_s - plain.backward_s == pytest.approx(2 * 8 * 3 * 1e-6)


def test_what_lies_in_no_cache_takes_longer_by_the_bytes_that_are_moved() -> None:
    model, plan = _described(), mw.Plan.parse("single")
    plain = mw.predict_plan(model, host(), TRAIN, plan).time
    kept = StepCosts(model, host()).predict(Setup(micro_batch_size=8)).memory.activations_bytes
    for size, part in ((1.0, 1.0), (kept**2, 0.5)):  # beyond the curve's end, and halfway to it
        curve = ((1.0, 0.0), (max(2.0, size), 1e-9))
        far = mw.predict_plan(model, host(far_traffic=curve), TRAIN, plan).time
        assert far.forward_s - plain.forward_s == pytest.approx(part * 1e-9 * 8 * 2 * 8 * 4)
        assert far.backward_s - plain.backward_s == pytest.approx(part * 1.5e-9 * 8 * 2 * 8 * 4)
        far = mw.predict_plan(model, host(far_product=curve), TRAIN, plan).time
        product = 4 * (8 * 8 + 8 * 8 + 8 * 8)  # of 8 samples: input, weight and result
        assert far.forward_s - plain.forward_s == pytest.approx(part * 1e-9 * 2 * product)
        assert far.backward_s - plain.backward_s == pytest.approx(part * 1e-9 * 4 * product)


@pytest.mark.parametrize("curve", [((1e3, 1e-9), (1e2, 1e-9)), ((1e3,),), ((1e3, -1e-9),)])
def test_times_far_away_ascend_by_size_and_are_not_negative(curve: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="rule"):
        ideal_with(far_traffic=curve)


@pytest.mark.parametrize("ratios", [(1.0,), (1.0, -1.0)])
def test_a_functions_ratios_are_two_and_not_negative(ratios: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"functions\['silu'\]"):
        host(functions={"silu": ratios})


def test_functions_that_a_probe_times_are_those_that_a_description_names() -> None:
    for name, function in FUNCTIONS.items():
        model = mw.describe_model(functools.partial(_Call, function), torch.zeros(4, 8, 6, 6))
        found = {operator.function for layer in model.layers for operator in layer.operators}
        assert name in found, (name, found)


class _Call(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Linear(6, 6)
        self.function = function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.function(self.scale(values))


# -- devices with many units ---------------------------------------------------------------------------------------------


def test_small_results_of_long_sums_are_shared_by_the_units() -> None:
    """The gradient of a convolution's weight has few tiles; in one piece it would leave nearly all units idle."""
    machine = Machine(host(), ideal_with(num_units=132))

    def seconds(inner: int) -> float:
        return machine.product_s((147, inner, 64), 1.0, "fp32", 4.0, aligned=True)

    one_tile = 2.0 * 64 * 64 * 200_000 * 132 / machine.flops_per_s("fp32") / 0.6
    assert seconds(200_000) < one_tile / 10
    assert seconds(200_000) >= 2.0 * 147 * 200_000 * 64 / machine.flops_per_s("fp32")
    assert seconds(400_000) == pytest.approx(2 * seconds(200_000), rel=0.1)
