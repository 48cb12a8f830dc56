"""Costs from what a probe measured: curves by size, kernels of recurrences and attention, and what the runtime adds."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import ApplyError, ConfigError
from meshwright.hardware import ClusterSpec
from meshwright.hardware.efficiency import time_of_work
from meshwright.hardware.exchanges import EXCHANGES, exchange_s
from meshwright.plan.costs.machine import Machine
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_costs import StepCosts
from meshwright.schedule.balance import balance_layers, work_of
from unit.plan.ideal import IDEAL, ideal_with
from unit.plan.measured_host import MODEL, TRAIN, host, predicted


def added(line: str, **runtime: tuple[float, float]) -> float:
    """Return by how much a plan's step takes longer where the runtime adds something."""
    return predicted(line, runtime=runtime).step_s - predicted(line).step_s


# -- what the runtime adds ---------------------------------------------------------------------------------------------


def test_every_step_takes_the_runtimes_own_time() -> None:
    layers = len(MODEL.layers)
    for line in ("single", "dp=2", "dp=2,zero=3"):
        assert added(line, step=(1e-3, 1e-5)) == pytest.approx(1e-3 + layers * 1e-5)
    assert added("pp=2,micro_batches=4", step=(1e-3, 1e-5)) == pytest.approx(1e-3 + layers / 2 * 1e-5)


@pytest.mark.parametrize(
    ("line", "times"),
    [
        ("dp=2", 0),
        ("dp=2,zero=1", 0),
        ("dp=2,zero=2", 1),
        ("dp=2,zero=3,micro_batches=4", 4),
        ("dp=2,pp=2,zero=3,micro_batches=2", 0),
    ],
)
def test_zero_takes_it_for_each_exchange_of_a_parameter(line: str, times: int) -> None:
    fixed = added(line, zero=(1e-3, 0.0))
    assert fixed == pytest.approx(times * 1e-3, abs=1e-12)
    assert (added(line, zero=(0.0, 1e-5)) > 0) == (times > 0)


def test_recompute_takes_it_for_each_micro_batch() -> None:
    assert added("dp=2,recompute=full", recompute=(1e-3, 0.0)) == pytest.approx(1e-3)
    assert added("dp=2,recompute=full,micro_batches=4", recompute=(1e-3, 1e-4)) == pytest.approx(
        4 * (1e-3 + len(MODEL.layers) * 1e-4)
    )
    assert added("dp=2", recompute=(1e-3, 1e-4)) == 0


def test_each_stage_follows_the_whole_forward_of_each_micro_batch() -> None:
    layers = len(MODEL.layers)
    # Four micro-batches, and the first one's way through the other stage.
    one = added("pp=2,schedule=gpipe,micro_batches=4", stage=(1e-3, 1e-5))
    assert one == pytest.approx(5 * (1e-3 + layers * 1e-5))
    two = added("pp=2,schedule=interleaved,virtual=2,micro_batches=4", stage=(1e-3, 1e-5))
    assert two > 1.5 * one
    assert added("pp=2,micro_batches=4", half=(1e-3, 0.0)) == 0
    assert added("pp=2,schedule=zb-h1,micro_batches=4", half=(1e-3, 0.0)) >= 4e-3
    assert added("dp=2", stage=(1e-3, 1e-5)) == 0


def test_tensor_parallelism_takes_it_for_each_exchange() -> None:
    costs = StepCosts(MODEL, host())
    layers = costs.passes(Setup.of(MODEL, mw.Plan.parse("tp=2"), TRAIN))
    # A block has two pairs of products; each gathers and scatters, in forward and in backward.
    assert 8 in [times.num_collectives for times in layers.kinds]
    exchanges = sum(layers.kinds[kind].num_collectives for kind in costs._kind)
    for micro_batches in (1, 2):
        line = f"tp=2,micro_batches={micro_batches}"
        assert added(line, tensor=(1e-3, 0.0)) == pytest.approx(1e-3)
        assert added(line, tensor=(0.0, 1e-5)) == pytest.approx(micro_batches * exchanges * 1e-5)
    assert added("dp=2", tensor=(1e-3, 1e-5)) == 0


def test_ranks_that_exchange_in_each_layer_wait_for_each_other() -> None:
    plain, slow = (predicted("tp=2", skew=share).time for share in (0.0, 0.1))
    assert slow.forward_s == pytest.approx(1.1 * plain.forward_s, rel=0.02)  # exchanges themselves are some of it
    assert slow.backward_s > 1.08 * plain.backward_s
    assert predicted("dp=2", skew=0.1) == predicted("dp=2")


def test_calls_between_layers_take_it_on_every_stage() -> None:
    class Glued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x) * 2 + 1)

    model, train = mw.describe_model(Glued, torch.zeros(4, 8)), mw.TrainSpec(global_batch_size=8)
    plan = mw.Plan.parse("pp=2,schedule=gpipe,micro_batches=4")
    plain, other = (
        mw.predict_plan(model, host(runtime=runtime), train, plan)
        for runtime in ({"stage": (0.0, 0.0)}, {"between": (0.0, 1e-3)})
    )
    assert other.step_s - plain.step_s == pytest.approx(5 * 2 * 1e-3)


def test_a_convolution_takes_what_one_of_its_arithmetic_took() -> None:
    model = mw.describe_model(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 1)), torch.zeros(4, 4, 6, 6)
    )
    assert [operator.function for layer in model.layers for operator in layer.operators] == [
        "convolution",
        "convolution",
    ]
    flops = [8 * 2.0 * 36 * 4 * 4 * 9, 8 * 2.0 * 36 * 4 * 8]  # of 8 samples
    rows = ((flops[1], 1e-3, 2e-3), (flops[0], 4e-3, 6e-3))
    found = mw.predict_plan(model, host(convolution=rows), TRAIN, mw.Plan.parse("single")).time
    assert found.forward_s == pytest.approx(5e-3, rel=1e-2)
    assert found.backward_s == pytest.approx(8e-3, rel=1e-2)
    assert [time_of_work(work, rows, 1) for work in (1.0, 2 * flops[0])] == pytest.approx([1e-3, 8e-3])
    assert time_of_work((flops[0] * flops[1]) ** 0.5, rows, 2) == pytest.approx((2e-3 * 6e-3) ** 0.5)
    with pytest.raises(ConfigError, match="convolution"):
        host(convolution=rows[::-1])


@pytest.mark.parametrize("runtime", [{"walk": (1.0, 1.0)}, {"step": (1.0,)}, {"step": (-1.0, 0.0)}])
def test_what_the_runtime_adds_is_two_times_of_a_known_kind(runtime: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError, match="rule"):
        ideal_with(runtime=runtime)


def test_measured_numbers_survive_their_file() -> None:
    curves = {"product_curve": ((1e3, 0.1), (1e6, 0.9)), "traffic_curve": ((1e3, 0.5), (1e6, 1.0))}
    exchanges = {"message": ((2.0, 1e3, 1e-5), (2.0, 1e6, 1e-3))}
    measured = {"runtime": {"stage": (1e-3, 1e-5)}, "exchanges": exchanges, "process_bytes": 1e8, "held": 1.2}
    cluster = host(**curves, **measured, recurrence_forward=0.4)
    assert ClusterSpec.from_json(cluster.to_json()) == cluster


# -- exchanges ---------------------------------------------------------------------------------------------------------

ROWS = ((2.0, 1e3, 1e-5), (2.0, 1e6, 1e-3), (8.0, 1e3, 3e-5), (8.0, 1e6, 4e-3))


@pytest.mark.parametrize(
    ("num_bytes", "ranks", "seconds"),
    [
        (10.0, 2, 1e-5),  # the latency
        (1e3, 2, 1e-5),
        (1e6, 2, 1e-3),
        ((1e3 + 1e6) / 2, 2, (1e-5 + 1e-3) / 2),
        (2e6, 2, 1e-3 + 1e6 * (1e-3 - 1e-5) / (1e6 - 1e3)),  # the bandwidth of the last two
        (1e6, 8, 4e-3),
        (1e6, 4, 2.5e-3),  # half of the way from two to eight
        (1e6, 16, 4e-3),  # the nearest that was measured
    ],
)
def test_an_exchange_takes_what_was_measured(num_bytes: float, ranks: int, seconds: float) -> None:
    assert exchange_s(ROWS, num_bytes, ranks) == pytest.approx(seconds)


def test_noise_makes_no_exchange_faster_than_a_smaller_one_without_end() -> None:
    noisy = ((2.0, 1e6, 1e-3), (2.0, 2e6, 0.9e-3))
    assert exchange_s(noisy, 1e9, 2) > 20 * exchange_s(noisy, 2e6, 2)
    assert exchange_s(((2.0, 1e6, 1e-3),), 4e6, 2) == pytest.approx(4e-3)


def test_measured_exchanges_stand_for_the_link() -> None:
    rows = {"all_reduce": ROWS, "message": ((2.0, 1e6, 5e-4),)}
    machine = Machine(host(), ideal_with(exchanges=rows))
    assert machine.collective_s("all_reduce", 1e6, 8, 1) == pytest.approx(4e-3)
    assert machine.message_s(1e6, inside=True) == pytest.approx(5e-4)
    plain = Machine(host(), IDEAL)
    assert machine.collective_s("all_gather", 1e6, 8, 1) == plain.collective_s("all_gather", 1e6, 8, 1)


def test_slower_exchanges_make_every_plan_that_uses_them_slower() -> None:
    def seconds(plan: str, **kinds: float) -> float:
        sizes, fixed = (1e2, 1e9), 1e-6
        rows = {kind: tuple((2.0, size, fixed + size * each) for size in sizes) for kind, each in kinds.items()}
        return mw.predict_plan(MODEL, host(exchanges=rows), TRAIN, mw.Plan.parse(plan)).step_s

    fast = dict.fromkeys(EXCHANGES, 1e-10)
    for plan, kinds in {
        "dp=2": ["all_reduce"],
        "dp=2,zero=3": ["all_gather", "reduce_scatter"],
        "tp=2,sequence_parallel=off": ["all_reduce"],
        "pp=2,micro_batches=2": ["message"],
    }.items():
        for kind in EXCHANGES:
            slower = seconds(plan, **fast | {kind: 1e-8}) > seconds(plan, **fast)
            assert slower == (kind in kinds), (plan, kind)


@pytest.mark.parametrize(
    "exchanges",
    [{"gather": ROWS}, {"message": ((2.0, 1e3),)}, {"message": ((2.0, 0.0, 1.0),)}, {"message": (ROWS[1], ROWS[0])}],
)
def test_rows_of_exchanges_are_of_a_known_kind_positive_and_in_order(exchanges: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="rule"):
        ideal_with(exchanges=exchanges)


# -- curves ------------------------------------------------------------------------------------------------------------


def test_products_and_traffic_go_by_their_size() -> None:
    cluster = host()
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes_per_s=1e15))
    machine = Machine(cluster, IDEAL)
    slow = Machine(cluster, ideal_with(product_curve=((1e4, 0.1), (1e8, 1.0))))
    sizes = [8, 32, 128, 512]
    ratios = [
        slow.product_s((size, size, size), 1.0, "fp32", 4.0, aligned=True)
        / machine.product_s((size, size, size), 1.0, "fp32", 4.0, aligned=True)
        for size in sizes
    ]
    assert all(one >= other - 1e-9 for one, other in itertools.pairwise(ratios))
    assert ratios[0] > 2
    assert ratios[-1] == pytest.approx(1.0)
    traffic = Machine(cluster, ideal_with(traffic_curve=((1e4, 0.5), (1e8, 1.0))))
    assert traffic.traffic_s(1e4) == pytest.approx(2 * machine.traffic_s(1e4))
    assert traffic.traffic_s(1e9) == pytest.approx(machine.traffic_s(1e9))


@pytest.mark.parametrize("curve", [((1e3, 0.5), (1e2, 0.6)), ((1e3,),), ((1e3, -0.5),)])
def test_a_curve_ascends_and_is_positive(curve: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="rule"):
        ideal_with(product_curve=curve)


def test_scores_of_attention_take_their_time() -> None:
    plain, slow = predicted("single"), predicted("single", score_forward_s=1e-8)
    scores = 6 * 4 * 32 * 32 * 8 / 2  # half of them are masked
    assert slow.time.forward_s - plain.time.forward_s == pytest.approx(scores * 1e-8, rel=0.01)


# -- memory of a process -----------------------------------------------------------------------------------------------


def test_a_process_counts_once_and_the_allocator_holds_more_than_is_alive() -> None:
    plain = predicted("dp=2")
    more = predicted("dp=2", process_bytes=3e8, held=1.5)
    assert more.memory.buffers_bytes - plain.memory.buffers_bytes == pytest.approx(
        3e8 + 0.5 * plain.memory.activations_bytes, abs=2
    )
    assert more.memory.activations_bytes == plain.memory.activations_bytes


# -- stages ------------------------------------------------------------------------------------------------------------


def brute(costs: list[float], stages: int) -> float:
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)


def test_balanced_layers_are_the_best_of_all_cuts() -> None:
    draw = random.Random(5)
    for _ in range(200):
        costs = [float(draw.choice((0, 1, 2, 5, 9))) for _ in range(draw.randint(2, 9))]
        stages = draw.randint(1, len(costs))
        found = balance_layers(costs, stages)
        loads = [sum(cost for cost, stage in zip(costs, found, strict=True) if stage == one) for one in range(stages)]
        assert max(loads) == brute(costs, stages)
        assert found == sorted(found)
        assert set(found) == set(range(stages))


def test_stages_given_by_the_user_are_kept() -> None:
    assert balance_layers([1.0, 1.0, 1.0, 9.0], 2, [None, 1, None, None]) == [0, 1, 1, 1]
    with pytest.raises(ApplyError, match="stages="):
        balance_layers([1.0, 1.0], 2, [1, 0])


def test_work_counts_products_three_times_and_parameters_by_their_traffic() -> None:
    assert work_of(10.0, 2) == 3 * 10 + 48 * 2 + 1


def test_one_process_has_a_stage_after_the_other_and_one_optimizer() -> None:
    costs = StepCosts(MODEL, host(tensor_s=1e-3))
    whole = costs.predict(Setup.of(MODEL, mw.Plan.parse("single"), TRAIN))
    cut = costs.predict(Setup.of(MODEL, mw.Plan.preset("model_parallel", 2), TRAIN))
    assert cut.time.optimizer_s == pytest.approx(whole.time.optimizer_s)
    assert cut.time.forward_s + cut.time.backward_s + cut.time.bubble_s == pytest.approx(
        whole.time.forward_s + whole.time.backward_s, rel=0.01
    )


# -- elementwise functions ---------------------------------------------------------------------------------------------
