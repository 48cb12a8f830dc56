"""compare/refine: what short runs say about a machine, and the plans that it ranks after that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.compare import refine as module
from meshwright.compare.refine import Scalars, learn, plan_config, scalars_of, scaled
from meshwright.compare.rows import Trial
from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec
from meshwright.plan.search.ranking import predict_plan
from meshwright.train.planning import predictor
from meshwright.train.planning.config_model import Described
from unit.plan.ideal import ideal_with

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
        return [trial_of(plan, compute=1.5, exchange=1.0) for plan in best]

    monkeypatch.setattr(
        predictor, "describe_config", lambda _config, _autocast: Described(MODEL, TRAIN, loaded_bytes=0)
    )
    monkeypatch.setattr(predictor, "this_machine", lambda *_args, **_options: host())
    monkeypatch.setattr(module, "run_trials", run)
    monkeypatch.setattr(module, "keep_cluster", lambda cluster, *_places: kept.append(cluster))
    plain = plan_config(CLASSIC, devices=2, top=2)
    assert ran == kept == []
    text = plan_config(CLASSIC, devices=2, top=2, refine=3)
    assert len(ran[0]) == 3
    assert "Run for a few steps:" in text
    assert text.count("measured") == 3
    assert plain.splitlines()[0] == text.splitlines()[0]
    assert kept[0].device.peak("fp32") == pytest.approx(host().device.peak("fp32") / 1.5)


def test_plans_for_another_cluster_need_no_machine_of_that_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        predictor, "describe_config", lambda _config, _autocast: Described(MODEL, TRAIN, loaded_bytes=0)
    )
    monkeypatch.setattr(predictor, "this_machine", lambda *_args, **_options: pytest.fail("it was asked"))
    assert "8xh100-sxm" in plan_config(CLASSIC, cluster="8xh100-sxm", top=1)
    assert "1 x 4 x h100" in plan_config(CLASSIC, cluster="8xh100-sxm", devices=4, top=1)
    with pytest.raises(ConfigError, match="rule: at most the 8 that it has"):
        plan_config(CLASSIC, cluster="8xh100-sxm", devices=16)
