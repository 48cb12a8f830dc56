"""compare/refine: what short runs say about a machine, and the plans that it ranks after that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.compare import refine as module
from meshwright.compare.refine import Scalars, fastest_first, learn, plan_config, scalars_of, scaled
from meshwright.compare.rows import Trial
from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec
from meshwright.host import CACHE_VARIABLE
from meshwright.kept_files import keep_file
from meshwright.plan.search.ranking import predict_plan
from meshwright.train.config.load import load_config
from meshwright.train.planning import measured, predictor
from meshwright.train.planning.choosing import choose
from meshwright.train.planning.config_model import Described
from meshwright.train.planning.this_machine import CLUSTER_VARIABLE
from unit.plan.ideal import ideal_with


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep nothing where a user's runs would find it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(CLUSTER_VARIABLE, raising=False)


CLASSIC = Path(__file__).parents[3] / "examples" / "mlp_classic.toml"
MODEL = mw.ModelSpec.transformer(layers=4, hidden=256, heads=4, vocab=256, sequence=64)
TRAIN = mw.TrainSpec(global_batch_size=8)
LINES = ("dp=2", "dp=2,zero=1", "pp=2,micro_batches=2")

EFFICIENCY = ideal_with(
    operator_s=6e-6, collective_host_s=2e-5, link_latency_s=2e-5, step_s=2e-5, tensor_s=1e-5, score_forward_s=1e-9,
    score_backward_s=2e-9, runtime={"step": (4e-4, 1e-6), "stage": (3e-4, 1e-5)},
)  # fmt: skip


def host() -> ClusterSpec:
    """Return a CPU host as a probe would find it."""
    device = mw.DeviceSpec(
        name="cpu",
        peak_flops_per_s={"fp32": 1e11, "bf16": 2e11},
        memory_bytes_per_s=2e10,
        memory_bytes=8 * 2**30,
        sources={"peak_flops_per_s.fp32": "measured"},
    )
    link = mw.LinkSpec(name="between-ranks", bytes_per_s=4e9, latency_s=2e-5)
    return ClusterSpec(name="host", device=device, devices_per_host=2, link=link, efficiency=EFFICIENCY)


def plans() -> list[mw.Plan]:
    return [plan.replace(prediction=predict_plan(MODEL, host(), TRAIN, plan)) for plan in map(mw.Plan.parse, LINES)]


def trial_of(plan: mw.Plan, *, compute: float, exchange: float) -> Trial:
    """Return a run that computes and waits so many times as long as predicted."""
    assert plan.prediction is not None
    time = plan.prediction.time
    waits = exchange * time.exposed_comm_s + time.bubble_s
    busy = compute * (time.forward_s + time.backward_s + time.recompute_s + time.optimizer_s)
    return Trial(
        name=str(plan), plan=str(plan), num_devices=2, num_ranks=2, step_seconds=[busy + waits] * 3, num_samples=[8] * 3,
        num_tokens=[512] * 3, losses=[1.0] * 6, sent_bytes=[[0.0, 0.0]] * 3, wait_seconds=[[waits, waits]] * 3,
    )  # fmt: skip


def of_single(step_s: float) -> Trial:
    return Trial(
        name="single", plan="single", step_seconds=[step_s] * 3, num_samples=[8] * 3, num_tokens=[512] * 3, losses=[1.0] * 6,
        sent_bytes=[[0.0]] * 3,
    )  # fmt: skip


def failed(plan: mw.Plan) -> Trial:
    return Trial(name=str(plan), plan=str(plan), num_devices=2, num_ranks=2, error="no memory")


def test_scalars_are_what_runs_took_over_what_was_predicted() -> None:
    found = scalars_of(plans(), [trial_of(plan, compute=1.5, exchange=3.0) for plan in plans()])
    assert found.compute == pytest.approx(1.5)
    assert found.exchange == pytest.approx(3.0)


def test_plans_that_failed_say_nothing() -> None:
    one, *others = plans()
    found = scalars_of([one, *others], [trial_of(one, compute=2.0, exchange=1.0), *map(failed, others)])
    assert found.compute == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="no memory"):
        scalars_of(plans(), list(map(failed, plans())))


@pytest.mark.parametrize("line", LINES)
def test_after_the_correction_a_step_is_predicted_as_it_was_measured(line: str) -> None:
    plan = mw.Plan.parse(line)
    before = predict_plan(MODEL, host(), TRAIN, plan)
    after = predict_plan(MODEL, scaled(host(), Scalars(2.0, 2.0)), TRAIN, plan)
    assert after.step_s == pytest.approx(2 * before.step_s, rel=1e-6)
    computes = predict_plan(MODEL, scaled(host(), Scalars(2.0, 1.0)), TRAIN, plan)
    assert computes.time.forward_s == pytest.approx(2 * before.time.forward_s, rel=0.05)
    if plan.pp == 1:
        assert computes.time.exposed_comm_s == pytest.approx(before.time.exposed_comm_s, rel=1e-6)


def test_a_correction_names_itself_once() -> None:
    twice = scaled(scaled(host(), Scalars(2.0, 1.0)), Scalars(0.5, 1.0))
    assert twice.device.sources["peak_flops_per_s.fp32"] == "measured; corrected by 0.5 after runs"


def test_waiting_that_was_not_foreseen_says_nothing() -> None:
    def alone(plan: mw.Plan) -> mw.Plan:
        assert plan.prediction is not None
        time = dataclasses.replace(plan.prediction.time, exposed_comm_s=1e-17)
        return plan.replace(prediction=dataclasses.replace(plan.prediction, time=time))

    trials = [trial_of(plan, compute=1.0, exchange=1.0) for plan in plans()]
    assert scalars_of(list(map(alone, plans())), trials).exchange == 1.0


def test_plans_are_ranked_where_the_machine_is_not_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        predictor, "describe_config", lambda _config, _autocast: Described(MODEL, TRAIN, loaded_bytes=0)
    )
    monkeypatch.setattr(predictor, "this_machine", lambda *_args, **_options: host())
    monkeypatch.setattr(module, "keep_cluster", lambda *_args: pytest.fail("it is not to be kept"))
    monkeypatch.setattr(
        module,
        "run_trials",
        lambda _config, best, _steps, _view: [
            trial_of(plan, compute=30.0, exchange=1.0) if plan.prediction else of_single(1.0) for plan in best
        ],
    )
    text = plan_config(CLASSIC, devices=2, top=2, refine=1)
    assert "stay as they were" in text
    assert "meshwright probe" in text
    assert "`--plan auto` takes" in text


@pytest.mark.parametrize("compute", [0.05, 20.0])
def test_a_ratio_that_no_machine_explains_is_refused(compute: float) -> None:
    with pytest.raises(ConfigError, match=r"rule: 0\.1 to 10"):
        learn(host(), plans(), [trial_of(plan, compute=compute, exchange=1.0) for plan in plans()])


def test_the_best_plans_are_run_and_what_they_say_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    kept: list[ClusterSpec] = []

    def run(_config: Any, best: Sequence[mw.Plan], steps: int, _view: Any) -> list[Trial]:
        assert steps > 0
        ran.append([str(plan) for plan in best])
        return [trial_of(plan, compute=1.5, exchange=1.0) if plan.prediction else of_single(2e-3) for plan in best]

    monkeypatch.setattr(
        predictor, "describe_config", lambda _config, _autocast: Described(MODEL, TRAIN, loaded_bytes=0)
    )
    monkeypatch.setattr(predictor, "this_machine", lambda *_args, **_options: host())
    monkeypatch.setattr(module, "run_trials", run)
    monkeypatch.setattr(module, "keep_cluster", lambda cluster, *_places: kept.append(cluster))
    plain = plan_config(CLASSIC, devices=2, top=2)
    assert ran == kept == []
    text = plan_config(CLASSIC, devices=2, top=2, refine=3)
    assert [len(turn) for turn in ran] == [4, 4, 4], "three plans, and one process with all cores"
    assert len({turn[0] for turn in ran}) == 3, "each turn begins with another"
    assert "Run in 3 turns" in text
    assert text.count(" predicted, ") == 3
    assert plain.splitlines()[0] == text.splitlines()[0]
    assert kept[0].device.peak("fp32") == pytest.approx(host().device.peak("fp32") / 1.5)
    assert "'single' with all cores: 2 ms measured" in text


def test_plans_that_ran_are_ranked_by_what_they_took_whatever_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        predictor, "describe_config", lambda _config, _autocast: Described(MODEL, TRAIN, loaded_bytes=0)
    )
    monkeypatch.setattr(predictor, "this_machine", lambda *_args, **_options: host())
    slower = {0: 1.5, 1: 1.0, 2: 2.0}
    order: list[str] = []

    def run(_config: Any, best: Sequence[mw.Plan], _steps: int, _view: Any) -> list[Trial]:
        order.extend(str(plan) for plan in best if plan.prediction and str(plan) not in order)
        return [
            trial_of(plan, compute=slower[order.index(str(plan))], exchange=1.0) if plan.prediction else of_single(1.0)
            for plan in best
        ]

    monkeypatch.setattr(module, "run_trials", run)
    text = plan_config(CLASSIC, devices=2, top=5, refine=2)
    rows = [line.split()[1] for line in text.splitlines() if line[:1].isdigit() and line[1:3] == ". "]
    assert rows[:3] == [order[1], order[0], "single"]
    assert f"`--plan auto` takes '{order[1]}'" in text
    assert "measured on" in text.partition("Why ")[2].splitlines()[1]
    # What is kept is what a later listing and a run of "auto" begin with.
    later = plan_config(CLASSIC, devices=2, top=5)
    assert [line.split()[1] for line in later.splitlines() if line[:2] in ("1.", "2.", "3.")] == rows[:3]
    chosen, lines = choose(load_config(CLASSIC, plan="auto", devices=2), predictor.Predictor(load_config(CLASSIC)))
    assert str(chosen.plan) == order[1]
    assert "measured on" in lines[1]


def test_one_process_that_was_the_fastest_is_what_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Described(MODEL, TRAIN, loaded_bytes=0)
    monkeypatch.setattr(predictor, "describe_config", lambda _config, _autocast: known)
    monkeypatch.setattr(predictor, "this_machine", lambda *_args, **_options: host())
    ran = [("single", 0.1), ("dp=2", 0.2)]
    kept = [measured.MeasuredPlan(mw.Plan.parse(line), step_s, "2026-11-27", 3) for line, step_s in ran]
    measured.keep_measured(known, 2, kept)
    config = load_config(CLASSIC, plan="auto", devices=2)
    chosen, lines = choose(config, predictor.Predictor(config))
    assert (str(chosen.plan), chosen.plan.num_ranks) == ("single", 1)
    assert lines[:1] == ["plan auto: 'single'"]
    # What stands behind "auto" still decides among them.
    config = load_config(CLASSIC, plan="auto,dp=2", devices=2)
    assert str(choose(config, predictor.Predictor(config))[0].plan) == "dp=2"


def test_a_plan_that_failed_once_is_not_among_the_fastest() -> None:
    made, single = plans(), of_single(1.0)
    turns = [[trial_of(made[0], compute=1.0, exchange=1.0), single], [failed(made[0]), single]]
    (one,) = fastest_first([made[0], mw.Plan.parse("single")], turns)
    assert (str(one.plan), one.step_s, one.turns) == ("single", 1.0, 2)


def test_the_order_is_that_of_shares_of_a_turn_not_of_seconds() -> None:
    made = plans()[:2]
    turns = [[of_single(slow * one) for one in (1.0, 0.9)] for slow in (1.0, 3.0, 1.02)]
    turns[1] = [of_single(3.0), of_single(2.7)]
    assert [str(one.plan) for one in fastest_first(made, turns)] == [str(made[1]), str(made[0])]


@pytest.mark.parametrize("written", [b"[", b'{"plan": 3}', b'[{"plan": "dp=no"}]', b"[{}]", b"[3]"])
def test_what_cannot_be_read_of_plans_that_ran_is_left_aside(written: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "plans.json"
    monkeypatch.setattr(measured, "kept_file", lambda *_facts: path)
    known = Described(MODEL, TRAIN, loaded_bytes=0)
    assert measured.measured_plans(known, 2) == []
    measured.keep_measured(known, 2, [measured.MeasuredPlan(mw.Plan.parse("dp=2"), 0.5, "2026-11-27", 3)])
    assert [str(one.plan) for one in measured.measured_plans(known, 2)] == ["dp=2"]
    keep_file(path, written)
    assert measured.measured_plans(known, 2) == []


def test_plans_for_another_cluster_need_no_machine_of_that_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        predictor, "describe_config", lambda _config, _autocast: Described(MODEL, TRAIN, loaded_bytes=0)
    )
    monkeypatch.setattr(predictor, "this_machine", lambda *_args, **_options: pytest.fail("it was asked"))
    assert "8xh100-sxm" in plan_config(CLASSIC, cluster="8xh100-sxm", top=1)
    assert "1 x 4 x h100" in plan_config(CLASSIC, cluster="8xh100-sxm", devices=4, top=1)
    with pytest.raises(ConfigError, match="rule: at most the 8 that it has"):
        plan_config(CLASSIC, cluster="8xh100-sxm", devices=16)
