"""Costs of a step: published formulas to the digit, and rules that any model of a machine keeps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from meshwright.hardware import load_cluster
from meshwright.hardware.efficiency import efficiency_of, read_table
from meshwright.plan.costs.data_parallel_cost import exchange
from meshwright.plan.costs.layer_times import layer_times
from meshwright.plan.costs.machine import Machine
from meshwright.plan.costs.rank_memory import micro_batches_in_flight, state_bytes
from meshwright.plan.costs.setup import Setup, StateBytes
from meshwright.plan.costs.stages import balanced_cut, pipeline_s
from meshwright.plan.costs.step_costs import StepCosts
from meshwright.schedule import PipelineSchedule
from meshwright.spec import ModelSpec, Plan, TrainSpec
from meshwright.traffic import ring_gradient_bytes, sharded_bytes

MIXED = StateBytes(parameter=2.0, gradient=2.0, optimizer=12.0)
"""fp16 training of the ZeRO paper: fp16 parameters and gradients, fp32 copy and two moments."""


def machine(name: str = "4x8xa100-sxm-80gb", **changes: float) -> Machine:
    cluster = load_cluster(name)
    return Machine(cluster, dataclasses.replace(efficiency_of(cluster.device.name), **changes))


def gpt(**changes: object) -> ModelSpec:
    sizes: dict[str, object] = {
        "layers": 8,
        "hidden": 1024,
        "heads": 16,
        "vocab": 8192,
        "sequence": 512,
        "element_bytes": 2,
    }
    return ModelSpec.transformer(**(sizes | changes))  # type: ignore[arg-type]


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "expected_gb"),
    # Rajbhandari et al. 2020, arXiv:1910.02054, figure 1: 7.5 billion parameters over 64 devices.
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
)
def test_states_are_those_of_the_zero_papers_figure(zero: int, expected_gb: float) -> None:
    setup = Setup(dp=64, zero=zero, shard=64 if zero else 1, states=MIXED)
    assert sum(state_bytes(7.5e9, setup)) / 1e9 == pytest.approx(expected_gb, abs=0.05)


@pytest.mark.parametrize("dp", [1, 4, 16, 64, 256, 1024])
def test_states_are_those_of_the_zero_papers_table(dp: int) -> None:
    # Rajbhandari et al. 2020, arXiv:1910.02054, table 1: GB a device for 7.5B, 128B and 1T parameters under stages 1, 2 and 3.
    # Its numbers are rounded, down or up, to some three digits.
    table = {
        1: (120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000),
        4: (52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000),
        16: (35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000),
        64: (31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250),
        256: (30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5),
        1024: (30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6),
    }
    found = [
        sum(state_bytes(num_params, Setup(dp=dp, zero=zero, shard=dp, states=MIXED))) / 1e9
        for num_params in (7.5e9, 128e9, 1e12)
        for zero in (1, 2, 3)
    ]
    assert found == [pytest.approx(number, rel=3e-3, abs=0.006) for number in table[dp]]


@pytest.mark.parametrize(("dp", "zero", "expected"), [(1, 0, 18.0), (8, 1, 6 + 12 / 8), (64, 1, 6 + 12 / 64)])
def test_megatrons_bytes_for_each_parameter(dp: int, zero: int, expected: float) -> None:
    # Megatron-LM, docs: bf16 parameters, fp32 gradients and optimizer: 18, and 6 + 12 / d with a distributed optimizer.
    states = StateBytes(parameter=2.0, gradient=4.0, optimizer=12.0)
    assert sum(state_bytes(1.0, Setup(dp=dp, zero=zero, shard=dp if zero else 1, states=states))) == expected


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "formula"),
    # Korthikanti et al. 2022, arXiv:2205.05198, table 2, without the factor s b h: (s, h, a, t) -> bytes.
    [
        (1, False, "none", lambda s, h, a, t: 34 + 5 * a * s / h),
        (4, False, "none", lambda s, h, a, t: 10 + 24 / t + 5 * a * s / (h * t)),
        (4, True, "none", lambda s, h, a, t: 34 / t + 5 * a * s / (h * t)),
        (4, False, "selective", lambda s, h, a, t: 10 + 24 / t),
        (4, True, "selective", lambda s, h, a, t: 34 / t),
        (4, False, "full", lambda s, h, a, t: 2),
    ],
)
def test_activations_are_those_of_korthikanti(tp, sequence_parallel, recompute, formula) -> None:
    hidden, heads, sequence, batch = 1024, 16, 512, 3
    model = gpt(hidden=hidden, heads=heads, sequence=sequence, fused_attention=False, dropout=True, bias=False)
    setup = Setup(tp=tp, micro_batch_size=batch, sequence_parallel=sequence_parallel, dtype="fp16", element_bytes=2.0)
    times = layer_times(model.layers[1], setup, machine(), model_bytes=2.0)
    expected = sequence * batch * hidden * formula(sequence, hidden, heads, tp)
    assert times.kept_bytes(recompute) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 12)])
def test_micro_batches_in_flight_are_those_that_the_schedule_holds(
    schedule: Any, ranks: int, micro_batches: int
) -> None:
    virtual = 2 if schedule in ("interleaved", "zbv") else 1
    built = PipelineSchedule.build(schedule, num_ranks=ranks, num_micro_batches=micro_batches, virtual=virtual)
    simulated = built.simulate().peak_activations
    setup = Setup(pp=ranks, schedule=schedule, virtual=virtual, micro_batches=micro_batches)
    for rank, held in enumerate(simulated):
        predicted = micro_batches_in_flight(rank, setup) * virtual
        assert held <= predicted + 1e-9
        if schedule in ("gpipe", "1f1b"):
            assert predicted == held


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (8, 64)])
@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_bubbles_are_the_papers(ranks: int, micro_batches: int, schedule: str, virtual: int) -> None:
    # Narayanan et al. 2021, arXiv:2104.04473, section 2.2: (p - 1) / (v m) of the time without a bubble.
    total, bubble = pipeline_s(
        [1.0] * ranks,
        micro_batches=micro_batches,
        virtual=virtual,
        schedule=schedule,
        weight_fraction=1 / 3,
        send_s=0.0,
    )
    assert bubble / micro_batches == pytest.approx((ranks - 1) / (virtual * micro_batches))
    assert total == pytest.approx(micro_batches + bubble)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zbv", 2)],
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 2), (4, 2), (4, 4), (4, 8), (8, 4), (8, 32), (3, 7)])
def test_bubbles_are_those_of_the_schedules_that_run(
    schedule: Any, virtual: int, ranks: int, micro_batches: int
) -> None:
    if schedule == "interleaved" and micro_batches % ranks:
        return  # its order takes micro-batches in rounds of the ranks
    built = PipelineSchedule.build(schedule, num_ranks=ranks, num_micro_batches=micro_batches, virtual=virtual)
    total, bubble = pipeline_s(
        [3.0] * ranks,
        micro_batches=micro_batches,
        virtual=virtual,
        schedule=schedule,
        weight_fraction=1 / 3,
        send_s=0.0,
    )
    assert bubble / total == pytest.approx(built.simulate().bubble_fraction)


def test_zb_h1_leaves_a_third_of_the_bubble() -> None:
    # Qi et al. 2023, arXiv:2401.10241, table 1: (p - 1)(T_F + T_B - T_W) for (p - 1)(T_F + T_B + T_W), all three equal.
    bubbles = [
        pipeline_s([3.0] * 4, micro_batches=8, virtual=1, schedule=kind, weight_fraction=1 / 3, send_s=0.0)[1]
        for kind in ("1f1b", "zb-h1")
    ]
    assert bubbles[1] == pytest.approx(bubbles[0] / 3)


@pytest.mark.parametrize(("kind", "rounds"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_collectives_send_the_volumes_of_a_ring(kind: str, rounds: int) -> None:
    # Thakur et al. 2005, doi:10.1177/1094342005051521: (n - 1) / n of the tensor, twice for an all-reduce.
    found = machine()
    size = 1e12  # so that latency is nothing
    seconds = found.collective_s(kind, size, 8, 1)
    assert seconds * found.link_bytes_per_s / size == pytest.approx(rounds * 7 / 8, rel=1e-4)


def test_causal_attention_reaches_less_with_fewer_keys() -> None:
    def seconds(sequence: int, ramp: float) -> float:
        model = gpt(sequence=sequence, fused_attention=True, dropout=False)
        times = layer_times(
            model.layers[1], Setup(dtype="bf16", micro_batch_size=64), machine(attention_ramp=ramp), model_bytes=2.0
        )
        return times.core_s

    assert seconds(512, 512.0) == pytest.approx(2 * seconds(512, 0.0))
    assert seconds(4096, 512.0) == pytest.approx((1 + 512 / 4096) * seconds(4096, 0.0))


@pytest.mark.parametrize(("zero", "volume"), [(0, 2.0), (1, 2.0), (2, 2.0), (3, 3.0)])
def test_zero_sends_the_volumes_of_its_paper(zero: int, volume: float) -> None:
    setup = Setup(dp=64, zero=zero, shard=64 if zero else 1, sent_gradient_bytes=2.0, gathered_bytes=2.0)
    sent = exchange(
        setup, machine("8x8xa100-sxm-80gb"), num_params=1e9, forward_s=1.0, backward_s=2.0, depth=10
    ).sent_bytes
    assert sent == pytest.approx(volume * 2e9 * 63 / 64)


def test_sharding_inside_a_host_sends_less_between_hosts() -> None:
    wide = Setup(dp=32, zero=2, shard=32, overlap=False)
    narrow = dataclasses.replace(wide, shard=8)
    seconds = [
        exchange(setup, machine(), num_params=1e9, forward_s=1.0, backward_s=2.0, depth=10).exposed_s
        for setup in (wide, narrow)
    ]
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize("change", [{"tp": 2}, {"recompute": "full"}, {"micro_batch_size": 2.0}, {"dtype": "fp32"}])
def test_more_work_takes_more_time(change: dict[str, object]) -> None:
    model = gpt(hidden=4096, heads=32)
    costs = StepCosts(model, load_cluster("1x8xa100-sxm-80gb"))
    base = Setup(tp=4, micro_batch_size=1.0, dtype="bf16", element_bytes=2.0)
    assert costs.seconds(dataclasses.replace(base, **change)) > costs.seconds(base)  # type: ignore[arg-type]


def test_parts_add_up_and_memory_is_the_fullest_ranks() -> None:
    costs = StepCosts(gpt(), load_cluster("1x8xa100-sxm-80gb"))
    setup = Setup(dp=2, pp=4, micro_batches=8, zero=1, shard=2, dtype="bf16", element_bytes=2.0)
    prediction, cost = costs.predict(setup), costs.cost(setup)
    assert prediction.step_s == pytest.approx(cost.step_s)
    assert prediction.peak_bytes == pytest.approx(cost.memory.peak, abs=5)
    assert prediction.mfu is not None
    assert 0 < prediction.mfu < 1


def test_a_plans_setup_is_read_off_the_plan() -> None:
    plan = Plan.parse("dp=4,tp=2,pp=2,zero=2,shard=2,micro_batches=4,schedule=zbv,recompute=full,precision=bf16")
    setup = Setup.of(gpt(element_bytes=4), plan, TrainSpec(global_batch_size=64))
    assert (setup.dp, setup.tp, setup.pp, setup.zero, setup.shard, setup.virtual) == (4, 2, 2, 2, 2, 2)
    assert (setup.micro_batch_size, setup.dtype, setup.element_bytes) == (4.0, "bf16", 2.0)
    assert setup.sequence_parallel
    assert setup.states == StateBytes(parameter=4.0, gradient=4.0, optimizer=8.0)


# -- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [5, 1, 1, 1, 1, 7], [3, 1, 4, 1, 5, 9, 2, 6], [1] * 9 + [4]])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_cut_is_the_best_of_all_cuts(costs: list[float], num_stages: int) -> None:
    prefix = [0.0, *itertools.accumulate(costs)]

    def largest(bounds: tuple[int, ...]) -> float:
        return max(prefix[last] - prefix[first] for first, last in itertools.pairwise(bounds))

    found = balanced_cut(prefix, num_stages)
    every = ((0, *middle, len(costs)) for middle in itertools.combinations(range(1, len(costs)), num_stages - 1))
    assert len(found) == num_stages + 1
    assert largest(found) <= min(largest(bounds) for bounds in every) * 1.01


# -- efficiency -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", sorted(read_table()["devices"]))
def test_efficiencies_are_sound_and_have_a_source(device: str) -> None:
    table = read_table()
    assert table["all"]["source"]
    found = efficiency_of(device)
    assert all(0 < share <= 1 for share in found.matmul.values())
    assert math.isfinite(found.operator_s)


# -- what this project's engines do -----------------------------------------------------------------------------------


def test_a_tied_table_counts_once_on_a_rank_that_holds_both_ends() -> None:
    cluster = load_cluster("8xa100-sxm-80gb")
    tied, untied = gpt(tied=True, element_bytes=4), gpt(element_bytes=4)
    alone, ends = Setup(), Setup(pp=2, micro_batches=2)
    for model in (tied, untied):
        assert StepCosts(model, cluster).predict(alone).memory.parameters_bytes == 4 * model.num_params
    assert StepCosts(tied, cluster).predict(ends).memory == StepCosts(untied, cluster).predict(ends).memory


@pytest.mark.parametrize(("zero", "parameters", "gradients"), [(1, 1.0, 1.0), (2, 1.0, 1.25), (3, 1.25, 1.25)])
def test_a_pipeline_has_values_and_gradients_whole_during_a_step(
    zero: int, parameters: float, gradients: float
) -> None:
    plan = Plan(dp=4, pp=2, zero=zero, micro_batches=2)
    setup = Setup.of(gpt(element_bytes=4), plan, TrainSpec(global_batch_size=16))
    assert state_bytes(1.0, setup) == (4 * parameters, 4 * gradients, 2.0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("shard", [2, 4])
@pytest.mark.parametrize("pp", [1, 2])
def test_sent_bytes_are_those_that_runs_are_compared_with(zero: int, shard: int, pp: int) -> None:
    plan = Plan(dp=4, pp=pp, zero=zero, shard=shard if zero else None, micro_batches=8)
    setup = Setup.of(gpt(element_bytes=4), plan, TrainSpec(global_batch_size=32))
    sent = exchange(setup, machine(), num_params=1e6, forward_s=1.0, backward_s=2.0, depth=10).sent_bytes
    if not zero:
        expected = ring_gradient_bytes(4e6, 4)
    else:
        whole, gathered = (0.0, 4e6) if zero == 3 else (4e6, 0.0)
        expected = sharded_bytes(
            4e6, whole, gathered, zero=zero, shards=shard, replicas=4 // shard, passes=8, per_step=pp > 1
        )
    assert sent == expected


@pytest.mark.parametrize(("batch", "dp", "micro_batches"), [(9, 8, 2), (10, 4, 3), (1, 2, 1)])
def test_the_rank_with_the_most_samples_is_costed(batch: int, dp: int, micro_batches: int) -> None:
    setup = Setup.of(gpt(), Plan(dp=dp, micro_batches=micro_batches), TrainSpec(global_batch_size=batch))
    assert setup.micro_batch_size * setup.micro_batches == -(-batch // dp)
    prediction = StepCosts(gpt(), load_cluster("8xa100-sxm-80gb")).predict(setup)
    assert prediction.mfu is not None
    flops = 3 * gpt().forward_flops * batch
    assert prediction.mfu == pytest.approx(flops / prediction.step_s / (machine().peak("bf16") * dp))


def test_a_micro_batch_size_makes_as_many_parts_as_it_needs() -> None:
    setup = Setup.of(gpt(), Plan(dp=2, micro_batch_size=4), TrainSpec(global_batch_size=64))
    assert (setup.micro_batches, setup.micro_batch_size) == (8, 4.0)


def test_selective_recompute_keeps_results_of_products_and_of_attention() -> None:
    hidden, sequence, batch = 1024, 512, 3
    model = gpt(hidden=hidden, sequence=sequence)
    setup = Setup.of(model, Plan(recompute="selective"), TrainSpec(global_batch_size=batch))
    times = layer_times(model.layers[1], setup, machine(), model_bytes=2.0)
    # The input, queries, keys and values, attention's result, its projection, and both products of the MLP: of 16 h in all.
    assert times.kept_bytes(setup.recompute) == 2 * sequence * batch * hidden * (1 + 3 + 1 + 1 + 4 + 1)
    assert times.kept_bytes("none") == 2 * sequence * batch * hidden * 16
    _, _, again = times.passes_s(machine(operator_s=0.0), setup.recompute)
    assert again == pytest.approx(times.elementwise_s)
    assert again < times.forward_s
    _, _, again = times.passes_s(
        machine(), setup.recompute
    )  # the host issues ten operators, and works three times as long
    assert again == pytest.approx(3 * 10 * machine().efficiency.operator_s, rel=0.01)


def test_buffers_are_in_every_rank_s_memory() -> None:
    # A model with 100 MiB of buffers took twice what was predicted.
    cluster, plain = load_cluster("8xa100-sxm-80gb"), gpt()
    setup = Setup(dp=2, micro_batches=1, micro_batch_size=1)
    before = StepCosts(plain, cluster).predict(setup).memory
    for size in (1 << 20, 1 << 40):
        more = StepCosts(dataclasses.replace(plain, buffers_bytes=size), cluster).predict(setup).memory
        of_a_step = before.gradients_bytes + before.optimizer_bytes + before.activations_bytes
        expected = size + max(0, 2 * size - of_a_step)  # two copies, before there is anything of a step
        assert more.buffers_bytes - before.buffers_bytes == pytest.approx(expected, rel=1e-6)
