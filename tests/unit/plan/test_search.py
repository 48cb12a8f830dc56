"""Search of plans: the same answer as brute force, rules with reasons, and refusals that help."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from meshwright.errors import ConfigError, PlanError, StorageError
from meshwright.hardware import ClusterSpec, load_cluster
from meshwright.measure.probe_listing import save_cluster
from meshwright.plan.catalogue.catalogue import find_model
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_costs import StepCosts
from meshwright.plan.plan_table import list_plans
from meshwright.plan.search.candidate import Candidate, base_setup, plan_of, setup_of
from meshwright.plan.search.ranking import FoundPlans, _as_cut, make_plans, predict_plan, search
from meshwright.plan.search.select import select_strategy
from meshwright.plan.search.space import RULES, Choice, Degrees, Task, all_choices, all_degrees, rule_against
from meshwright.spec import LayerSpec, ModelSpec, Plan, TrainSpec
from meshwright.spec.operator import OperatorSpec

TRAIN = TrainSpec(global_batch_size=16, precision="bf16")


def gpt(**changes: int) -> ModelSpec:
    sizes = {"layers": 6, "hidden": 2048, "heads": 16, "vocab": 32000, "sequence": 1024}
    return ModelSpec.transformer(**(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("cluster", ["1xa100-sxm-80gb", "4xa100-sxm-40gb", "2x3xa100-sxm-40gb"])
def test_the_search_finds_what_brute_force_finds(cluster: str) -> None:
    found = load_cluster(cluster)
    task = Task(gpt(), found, TRAIN)
    costs = StepCosts(task.model, found)
    best = search(costs, task, top=3, memory_fraction=0.9).fitting
    limit = found.device.memory_bytes * 0.9
    every: list[Candidate] = []
    for dp, tp, pp, micro in itertools.product(range(1, 9), range(1, 9), range(1, 9), range(1, 17)):
        share = -(-16 // dp)  # of the rank that has the most samples
        if dp * tp * pp != found.num_devices or share % micro:
            continue
        degrees = Degrees(dp, tp, pp, micro, share // micro)
        if rule_against(degrees, task) is None:
            for choice in all_choices(degrees, task):
                setup = Setup.of(task.model, plan_of_choice(degrees, choice), TRAIN)
                every.append(Candidate(degrees, choice, StepCosts(task.model, found).cost(setup)))
    fitting = sorted((one for one in every if one.cost.memory.peak <= limit), key=Candidate.key)
    assert [one.key() for one in best] == [pytest.approx(one.key()) for one in fitting[:3]]


def found_plainly(costs: StepCosts, task: Task, top: int, fraction: float) -> FoundPlans:
    """Search without bounds: every mix is costed in full, and all are sorted."""
    limit, base = task.cluster.device.memory_bytes * fraction, base_setup(task.model, task.train)
    every: list[Candidate] = []
    for degrees in all_degrees(task):
        if rule_against(degrees, task) is not None:
            continue
        without: dict[Choice, float] = {}
        for choice in all_choices(degrees, task):
            one = Candidate(degrees, choice, costs.cost(setup_of(base, degrees, choice, task.train)))
            same = dataclasses.replace(choice, recompute="none")
            if choice.recompute == "none" or one.peak < without[same]:
                every.append(one)
            without.setdefault(same, one.peak)
    missing = [one for one in every if one.peak > limit]
    recut = _as_cut(
        sorted((one for one in every if one.peak <= limit), key=Candidate.key)[: 4 * top], base, costs, task
    )
    if sum(one.peak <= limit for one in recut) < top:
        missing.sort(key=lambda one: one.peak)
        recut += _as_cut(missing[:20], base, costs, task)
        missing = missing[20:]
    missing = sorted([*missing, *(one for one in recut if one.peak > limit)], key=lambda one: one.peak)
    fitting = sorted((one for one in recut if one.peak <= limit), key=Candidate.key)[:top]
    faster = [one for one in missing if fitting and one.cost.step_s < fitting[0].cost.step_s * 0.98]
    return FoundPlans(task, fitting, [] if fitting else missing[:3], faster[:3], {}, len(every), limit)


@pytest.mark.parametrize(
    ("cluster", "fraction"),
    [("4xa100-sxm-40gb", 0.9), ("8xl40s", 0.15), ("8xl40s", 0.04), ("2x4xa100-sxm-40gb", 0.07), ("1xrtx-4090", 0.2)],
)
def test_bounds_leave_nothing_out(cluster: str, fraction: float) -> None:
    task = Task(gpt(), load_cluster(cluster), TRAIN)
    costs = StepCosts(task.model, task.cluster)
    found, plain = search(costs, task, top=3, memory_fraction=fraction), found_plainly(costs, task, 3, fraction)
    for name in ("fitting", "misses", "faster_misses"):
        assert getattr(found, name) == getattr(plain, name), name


def test_no_step_takes_less_than_its_least_time() -> None:
    task = Task(gpt(), load_cluster("2x4xa100-sxm-40gb"), TRAIN)
    base, costs = base_setup(task.model, TRAIN), StepCosts(task.model, task.cluster)
    seen = 0
    for degrees in all_degrees(task):
        for choice in all_choices(degrees, task) if rule_against(degrees, task) is None else ():
            setup = setup_of(base, degrees, choice, TRAIN)
            assert costs.least_s(costs.passes(setup), setup) <= costs.cost(setup).step_s
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("cluster", ["2x4xa100-sxm-40gb", "8xl40s"])
def test_no_step_takes_less_than_the_least_time_of_its_order(cluster: str) -> None:
    task = Task(gpt(), load_cluster(cluster), TRAIN)
    base, costs = base_setup(task.model, TRAIN), StepCosts(task.model, task.cluster)
    tight = 0
    for degrees in all_degrees(task):
        for choice in all_choices(degrees, task) if rule_against(degrees, task) is None else ():
            setup = setup_of(base, degrees, choice, TRAIN)
            plain = setup_of(base, degrees, Choice(0, None, "1f1b", 1, "none", "none"), TRAIN)
            least = costs.least_order_s(plain, choice.schedule, choice.virtual, setup.recompute)
            seconds = costs.cost(setup).step_s
            assert 0 < least <= seconds
            tight += least > 0.8 * seconds
    assert tight > 100


def plan_of_choice(degrees: Degrees, choice: Choice) -> Plan:
    return Plan(
        dp=degrees.dp, tp=degrees.tp, pp=degrees.pp, micro_batches=degrees.micro_batches, precision="bf16",
        **{name: getattr(choice, name) for name in ("zero", "shard", "schedule", "virtual", "recompute", "offload")},
    )  # fmt: skip


def test_every_candidates_setup_is_that_of_its_plan() -> None:
    task = Task(gpt(), load_cluster("8xa100-sxm-80gb"), TRAIN)
    base, costs = base_setup(task.model, TRAIN), StepCosts(task.model, task.cluster)
    seen = 0
    for degrees in all_degrees(task):
        if rule_against(degrees, task) is not None:
            continue
        for choice in all_choices(degrees, task):
            setup = setup_of(base, degrees, choice, TRAIN)
            plan = plan_of(Candidate(degrees, choice, costs.cost(setup)), TRAIN)
            assert dataclasses.replace(setup, cut_by_work=True) == Setup.of(task.model, plan, TRAIN)
            assert plan.num_devices == 8
            seen += 1
    assert seen > 100


@pytest.mark.parametrize(
    ("degrees", "rule"),
    [
        (Degrees(1, 8, 1, 16, 1), "heads_divide"),
        (Degrees(1, 1, 16, 16, 1), "a_layer_for_each_stage"),
        (Degrees(32, 1, 1, 1, 1), "a_sample_for_each_rank"),
        (Degrees(1, 12, 1, 16, 1), "tp_inside_a_host"),
        (Degrees(2, 1, 4, 1, 8), "a_full_pipeline"),
    ],
)
def test_rules_leave_out_and_say_why(degrees: Degrees, rule: str) -> None:
    task = Task(gpt(heads=12, hidden=1536), load_cluster("2x8xa100-sxm-80gb"), TRAIN)
    rejected = rule_against(degrees, task)
    assert rejected is not None
    assert rejected.rule == rule
    assert any(character.isdigit() for character in rejected.reason)


def test_rules_are_named_once() -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


def test_plans_come_with_prediction_and_reasons_and_can_be_predicted_again() -> None:
    cluster = load_cluster("8xa100-sxm-80gb")
    plans = make_plans(gpt(), cluster, TRAIN, top=4)
    assert len(plans) == 4
    for plan in plans:
        assert plan.reasons
        assert plan.prediction == predict_plan(gpt(), cluster, TRAIN, plan)
        assert Plan.parse(str(plan), num_devices=8) == plan


def test_nothing_fits_names_the_nearest_and_how_much_they_miss() -> None:
    with pytest.raises(PlanError, match="no plan fits") as caught:
        make_plans(find_model("gpt3-175b"), load_cluster("1xa100-sxm-40gb"), TRAIN)
    assert caught.value.exit_code == 3
    assert "too much" in str(caught.value)
    assert caught.value.fix


def test_more_memory_makes_a_faster_plan_possible_and_the_best_plan_says_so() -> None:
    model, cluster = gpt(hidden=4096, heads=32, layers=56), load_cluster("8xa100-sxm-40gb")
    tight = make_plans(model, cluster, TRAIN, top=1)[0]
    roomy = make_plans(model, cluster.replace(device=cluster.device.replace(memory_bytes=80 * 10**9)), TRAIN, top=1)[0]
    assert tight.prediction is not None
    assert roomy.prediction is not None
    assert roomy.prediction.step_s < 0.95 * tight.prediction.step_s
    assert [reason for reason in tight.reasons if "more per device" in reason]


def test_a_plans_own_precision_is_what_is_costed() -> None:
    cluster, plan = load_cluster("8xa100-sxm-80gb"), Plan.parse("dp=8")
    plain = TrainSpec(global_batch_size=16)
    assert predict_plan(gpt(), cluster, TRAIN, plan) == predict_plan(gpt(), cluster, plain, plan)


def test_a_plan_of_too_many_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="uses 16 devices"):
        predict_plan(gpt(), load_cluster("8xa100-sxm-80gb"), TRAIN, Plan(dp=16))


@pytest.mark.parametrize("arguments", [{"top": 0}, {"memory_fraction": 0.0}, {"memory_fraction": 1.5}])
def test_arguments_out_of_range_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="rule"):
        make_plans(gpt(), load_cluster("8xa100-sxm-80gb"), TRAIN, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "devices"), [("125M", 1), ("125M", 2), (1.3e9, 12), ("7B", 64), ("llama3-8b", 8)])
def test_a_strategy_for_three_numbers_uses_all_devices(size: str | float, devices: int) -> None:
    plan = select_strategy(size, 256, devices, device="h200-sxm")
    assert plan.num_devices == devices
    assert plan.reasons


@pytest.mark.parametrize("size", ["", "7X", "-3B", "seven", 0, -1])
def test_a_size_that_is_none_is_refused(size: str | float) -> None:
    with pytest.raises(ConfigError, match="model_size"):
        select_strategy(size, 8, 1)


def test_a_group_of_tensor_parallelism_is_on_one_host() -> None:
    task = Task(gpt(), three_in_a_host(), TRAIN)
    assert "two hosts" in str(rule_against(Degrees(1, 2, 3, 16, 1), task))
    assert rule_against(Degrees(1, 2, 3, 16, 1), Task(gpt(), load_cluster("6xa100-sxm-80gb"), TRAIN)) is None


def three_in_a_host() -> ClusterSpec:
    return load_cluster("2x8xa100-sxm-80gb").replace(devices_per_host=3)


def test_nothing_is_offloaded_from_a_device_whose_memory_is_the_hosts() -> None:
    gpu = load_cluster("2xa100-sxm-80gb")
    cpu = gpu.replace(device=gpu.device.replace(name="cpu"))
    for cluster, offloads in ((gpu, True), (cpu, False)):
        choices = all_choices(Degrees(2, 1, 1, 1, 8), Task(gpt(), cluster, TRAIN))
        assert any(choice.offload == "optimizer" for choice in choices) == offloads


@pytest.mark.parametrize("batch", [61, 67, 134, 4099])
def test_a_batch_that_nothing_divides_takes_no_more_time_for_a_sample(batch: int) -> None:
    cluster = load_cluster("1xa100-sxm-80gb")
    seconds = [
        make_plans(gpt(), cluster, TrainSpec(global_batch_size=size, precision="bf16"), top=1)[0].prediction
        for size in (64, batch)
    ]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[1].step_s / batch < 1.1 * seconds[0].step_s / 64


def test_a_plan_with_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 stages, the model 8 layers") as caught:
        predict_plan(gpt(), load_cluster("8xa100-sxm-80gb"), TRAIN, Plan.parse("pp=8,schedule=zbv,micro_batches=8"))
    assert predict_plan(gpt(), load_cluster("8xa100-sxm-80gb"), TRAIN, Plan.parse(f"{caught.value.fix},schedule=zbv"))


def test_sequences_that_the_model_is_not_described_for_are_refused() -> None:
    train = TrainSpec(global_batch_size=16, sequence_length=128)
    cluster = load_cluster("1xa100-sxm-80gb")
    with pytest.raises(ConfigError, match="described for 1024 tokens"):
        make_plans(gpt(), cluster, train)
    with pytest.raises(ConfigError, match="described for 1024 tokens"):
        predict_plan(gpt(), cluster, train, Plan())


@pytest.mark.parametrize(
    ("field", "value"), [("peak_flops_per_s", {}), ("peak_flops_per_s", {"fp8": 1e15}), ("memory_bytes_per_s", None)]
)
def test_a_device_without_the_numbers_that_costs_need_is_refused(field: str, value: object) -> None:
    cluster = load_cluster("2xa100-sxm-80gb")
    with pytest.raises(ConfigError, match=field) as caught:
        make_plans(gpt(), cluster.replace(device=cluster.device.replace(**{field: value})), TRAIN)
    assert caught.value.fix


def test_devices_of_a_host_without_a_link_are_refused_where_there_are_several() -> None:
    cluster = load_cluster("2xa100-sxm-80gb").replace(link=None)
    with pytest.raises(ConfigError, match="no link"):
        make_plans(gpt(), cluster, TRAIN)
    assert make_plans(gpt(), cluster.replace(devices_per_host=1), TRAIN)


@pytest.mark.parametrize(("compress", "share"), [("none", 1.0), ("bf16", 0.5), ("int8", 0.254), ("int4", 0.133)])
def test_compressed_gradients_are_costed_as_they_are_sent(compress: str, share: float) -> None:
    cluster = load_cluster("8xa100-sxm-80gb")
    plain, found = (
        predict_plan(gpt(), cluster, TRAIN, Plan.parse(f"dp=8{text}")) for text in ("", f",compress={compress}")
    )
    assert found.sent_bytes["dp"] == pytest.approx(share * plain.sent_bytes["dp"], rel=0.01)


def test_a_compression_without_a_cost_is_refused() -> None:
    with pytest.raises(ConfigError, match="compress=powersgd"):
        predict_plan(gpt(), load_cluster("8xa100-sxm-80gb"), TRAIN, Plan.parse("dp=8,compress=powersgd"))


def test_a_prime_number_of_devices_says_what_would_do() -> None:
    cluster = load_cluster("8xa100-sxm-80gb").replace(devices_per_host=17)
    with pytest.raises(PlanError, match="breaks a rule") as caught:
        make_plans(gpt(), cluster, TRAIN)
    assert "17 samples" in str(caught.value.fix)
    assert make_plans(gpt(), cluster, TRAIN.replace(global_batch_size=17))


@pytest.mark.parametrize("path", ["missing/plans.json", "."])
def test_a_list_that_cannot_be_written_is_an_error_of_ours(path: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not be written"):
        list_plans(gpt(), load_cluster("1xa100-sxm-80gb"), TRAIN, top=1, json_path=tmp_path / path)
    with pytest.raises(StorageError, match="could not be written"):
        save_cluster(load_cluster("1xa100-sxm-80gb"), tmp_path / path)


def test_pipelines_send_activations_their_gradients_and_tied_gradients() -> None:
    # As ledgers of runs say: 8 samples of 32 x 64 float32 cross a cut twice, and the table of 128 x 64 is summed over its ends.
    stream, table = 8 * 32 * 64 * 4, 128 * 64 * 4
    cluster, train = load_cluster("4xa100-sxm-80gb"), TrainSpec(global_batch_size=8)
    cells = {
        "pp=2,micro_batches=4": (2 * stream + 2 * table) / 2,
        "pp=2,micro_batches=4,schedule=zbv": 4 * stream / 2,
        "pp=4,micro_batches=4": (6 * stream + 2 * table) / 4,
        "tp=2,pp=2,micro_batches=4": (2 * stream + table) / 2,
    }
    model = ModelSpec.transformer(layers=4, hidden=64, heads=4, vocab=128, sequence=32, tied=True)
    for text, expected in cells.items():
        assert predict_plan(model, cluster, train, Plan.parse(text)).sent_bytes["pp"] == expected


def test_a_plan_for_kinds_of_hosts_says_what_it_takes_them_for() -> None:
    plan = make_plans(gpt(), load_cluster("8xa100-40g + 8xh100-sxm"), TRAIN, top=1)[0]
    slow = make_plans(gpt(), load_cluster("2x8xa100-40g"), TRAIN, top=1)[0]
    assert plan == slow
    assert plan.prediction == slow.prediction
    assert any("taken for the slowest kind of 1 x 8 x a100-sxm-40gb" in reason for reason in plan.reasons)


def test_recompute_that_saves_nothing_is_not_offered() -> None:
    cluster = load_cluster("8xa100-sxm-80gb")
    for model in (gpt(), find_model("resnet-50")):
        for plan in make_plans(model, cluster, TRAIN, top=2000)[::20]:  # the best, the worst and between
            if plan.recompute != "none":
                plain = predict_plan(model, cluster, TRAIN, plan.replace(recompute="none"))
                assert plan.prediction is not None
                assert plan.prediction.peak_bytes < plain.peak_bytes


def test_weights_of_one_element_are_not_split_and_a_model_without_any_has_no_plan() -> None:
    product = OperatorSpec(kind="matmul", rows=1, inner=7, columns=1, num_params=7, split="columns")
    layer = LayerSpec(
        name="l", num_params=7, params_bytes=28, forward_flops=14.0, activation_bytes=28, operators=(product,)
    )
    one = ModelSpec(name="one", layers=(layer,))
    task = Task(one, load_cluster("4xa100-sxm-40gb"), TRAIN)
    rejected = rule_against(Degrees(1, 4, 1, 1, 16), task)
    assert rejected is not None
    assert rejected.rule == "something_to_split"
    wide = dataclasses.replace(layer, operators=(dataclasses.replace(product, columns=4),))
    assert rule_against(Degrees(1, 4, 1, 1, 16), dataclasses.replace(task, model=one.replace(layers=(wide,)))) is None
    none = ModelSpec(name="none", layers=(dataclasses.replace(layer, num_params=0, params_bytes=0, operators=()),))
    with pytest.raises(PlanError, match="'none' has no parameters"):
        make_plans(none, task.cluster, TRAIN)


def test_no_plan_needs_more_memory_than_there_is_however_its_stages_are_cut() -> None:
    # Layers of unlike work and memory: stages with equal work are not those with equal memory.
    layers = tuple(
        LayerSpec(
            name=f"l{place}",
            num_params=10_000 * (1 + place % 3),
            params_bytes=40_000 * (1 + place % 3),
            forward_flops=1e6 * (7 - place),
            activation_bytes=30_000 * (1 + 3 * (place == 2)),
            output_bytes=4_000,
        )
        for place in range(6)
    )
    model, train = ModelSpec(name="unlike", layers=layers), TrainSpec(global_batch_size=7, optimizer="sgd")
    roomy = load_cluster("3xa100-sxm-40gb")
    every = make_plans(model, roomy, train, top=1000, memory_fraction=1.0)
    peaks = sorted({plan.prediction.peak_bytes for plan in every if plan.prediction})
    for limit in (peaks[len(peaks) // 5 * step] for step in range(5)):
        device = dataclasses.replace(roomy.device, memory_bytes=limit)
        tight = dataclasses.replace(roomy, device=device)
        found = make_plans(model, tight, train, top=3, memory_fraction=1.0)
        assert found
        assert all(plan.prediction and plan.prediction.peak_bytes <= limit for plan in found)
