"""train/planning: machines kept between runs, predictions of a configuration's plans, and the choice that "auto" makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec, load_cluster
from meshwright.measure import host_pace
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainConfig
from meshwright.train.planning import predictor as module
from meshwright.train.planning import this_machine as machine
from meshwright.train.planning.choosing import choose, foresee
from meshwright.train.planning.config_model import Described, example_batch, why_whole
from meshwright.train.planning.held_against import held_against
from meshwright.train.planning.predictor import Predictor, default_devices, threads_of

CLASSIC = Path(__file__).parents[3] / "examples" / "mlp_classic.toml"
MODEL = mw.ModelSpec.transformer(layers=4, hidden=64, heads=4, vocab=256, sequence=32)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Have every configuration described as one small transformer, on a cluster with a name."""
    seen: list[TrainConfig] = []

    def describe(config: TrainConfig, _autocast: str) -> Described:
        seen.append(config)
        return Described(MODEL, mw.TrainSpec(global_batch_size=config.train.global_batch_size), loaded_bytes=0)

    monkeypatch.setattr(module, "describe_config", describe)
    monkeypatch.setenv(machine.CLUSTER_VARIABLE, "4xa100-80g")
    return seen


def classic(plan: str, devices: int | None = 2, *settings: str) -> TrainConfig:
    return load_config(CLASSIC, settings, plan=plan, devices=devices)


# -- the machine -------------------------------------------------------------------------------------------------------


def kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> ClusterSpec:
    monkeypatch.delenv(machine.CLUSTER_VARIABLE, raising=False)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(folder))
    cluster = load_cluster("2xa100-80g")
    machine.keep_cluster(cluster, 2, 1)
    return cluster


def test_what_is_kept_is_read_again_for_the_same_ranks_and_threads_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = kept(monkeypatch, tmp_path / "cache")
    assert machine.this_machine(2, 1, measure=False) == cluster
    assert machine.this_machine(2, 2, measure=False) is None
    assert machine.this_machine(1, 1, measure=False) is None


def test_a_kept_file_that_was_cut_is_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = kept(monkeypatch, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("machine-*.json")
    path.write_text(path.read_text(encoding="utf-8")[:40], encoding="utf-8")
    assert machine.this_machine(2, 1, measure=False) is None
    monkeypatch.setattr(machine, "probe_cluster", lambda *_args, **_options: cluster)
    assert machine.this_machine(2, 1) == cluster
    assert machine.this_machine(2, 1, measure=False) == cluster


def test_what_was_measured_beside_others_is_measured_anew_once_they_are_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quiet = kept(monkeypatch, tmp_path / "cache")
    disturbed = dataclasses.replace(quiet, taken_by_others=0.5)
    machine.keep_cluster(disturbed, 2, 1)
    monkeypatch.setattr(machine, "probe_cluster", lambda *_args, **_options: quiet)
    monkeypatch.setattr(machine, "is_busy", lambda: True)
    assert machine.this_machine(2, 1) == disturbed
    monkeypatch.setattr(machine, "is_busy", lambda: False)
    assert machine.this_machine(2, 1, measure=False) == disturbed
    assert machine.this_machine(2, 1) == quiet
    assert machine.this_machine(2, 1, measure=False) == quiet


def test_a_host_of_another_pace_is_measured_anew_once_no_programs_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = dataclasses.replace(kept(monkeypatch, tmp_path / "cache"), copied_bytes_per_s=8e9)
    fast = dataclasses.replace(gpus, device=dataclasses.replace(gpus.device, name="cpu"))
    slow = dataclasses.replace(fast, name="slow", copied_bytes_per_s=5e9)
    machine.keep_cluster(fast, 2, 1)
    monkeypatch.setattr(machine, "probe_cluster", lambda *_args, **_options: slow)
    monkeypatch.setattr(machine, "is_busy", lambda: False)
    monkeypatch.setattr(host_pace, "_rate_now", lambda: 7e9)
    assert machine.this_machine(2, 1) == fast
    monkeypatch.setattr(host_pace, "_rate_now", lambda: 5e9)
    assert not host_pace.has_other_pace(gpus)
    monkeypatch.setattr(machine, "is_busy", lambda: True)
    assert machine.this_machine(2, 1) == fast
    assert "0.62 times" in host_pace.pace_text(fast)
    assert "too short" in host_pace.pace_text(fast)
    monkeypatch.setattr(machine, "is_busy", lambda: False)
    assert machine.this_machine(2, 1) == slow
    monkeypatch.setattr(machine, "probe_cluster", lambda *_args, **_options: fast)
    assert machine.this_machine(2, 1) == slow, "its own pace is no reason"


def test_a_named_cluster_takes_the_machines_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.CLUSTER_VARIABLE, "8xh100-sxm")
    assert machine.this_machine(2, 1, measure=False) == load_cluster("8xh100-sxm")
    monkeypatch.setenv(machine.CLUSTER_VARIABLE, "8xnothing")
    with pytest.raises(ConfigError, match="nothing"):
        machine.this_machine(2, 1, measure=False)


# -- predictions -------------------------------------------------------------------------------------------------------


def test_a_model_is_described_once_for_all_plans(described: list[TrainConfig]) -> None:
    predictor = Predictor(classic("distributed"))
    one, other = (predictor.predict(mw.Plan.parse(line)) for line in ("dp=2", "pp=2,micro_batches=2"))
    assert one.prediction is not None
    assert other.prediction is not None
    assert one.prediction.step_s != other.prediction.step_s
    assert len(described) == 1


def test_what_cannot_be_described_is_said_and_not_tried_again(
    described: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def refuse(_config: TrainConfig, _autocast: str) -> Described:
        tried.append(1)
        raise ConfigError("the model needs values")

    monkeypatch.setattr(module, "describe_config", refuse)
    predictor = Predictor(classic("distributed"))
    for _ in range(2):
        assert predictor.predict(mw.Plan.parse("dp=2")).why_not == "the model needs values"
    assert tried == [1]
    assert described == []


def test_a_stop_while_the_machine_is_measured_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # `compare` noted that nothing was predicted, and ran its plans.
    def stopped(*_args: object, **_options: object) -> None:
        raise mw.StoppedOnRequest("the measurement of this machine was stopped")

    monkeypatch.setattr(module, "this_machine", stopped)
    with pytest.raises(mw.StoppedOnRequest):
        Predictor(classic("distributed")).predict(mw.Plan.parse("dp=2"))


def test_nothing_is_predicted_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.CLUSTER_VARIABLE, "none")
    found = Predictor(classic("distributed")).predict(mw.Plan.parse("dp=2"))
    assert (found.prediction, found.why_not) == (None, "")


def test_a_machine_that_is_not_measured_is_not_measured_for_a_prediction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept(monkeypatch, tmp_path / "cache")
    found = Predictor(classic("distributed"), measure=False).predict(mw.Plan.parse("dp=4"))
    assert found.prediction is None
    assert "meshwright probe" in found.why_not


def test_devices_and_threads_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    assert threads_of(mw.Plan.parse("dp=4")) == 2
    assert threads_of(mw.Plan.parse("dp=16")) == 1
    assert threads_of(mw.Plan.preset("model_parallel", 2)) == 8
    assert default_devices(classic("auto", 3)) == 3


# -- the choice --------------------------------------------------------------------------------------------------------


def test_auto_takes_the_planners_first_plan_and_says_why(described: list[TrainConfig]) -> None:
    config = classic("auto")
    chosen, lines = choose(config, Predictor(config))
    train = mw.TrainSpec(global_batch_size=config.train.global_batch_size)
    best = mw.make_plans(MODEL, load_cluster("2xa100-80g"), train)[0]  # two of the four devices that the cluster has
    assert chosen.plan == best
    assert chosen.plan.prediction == best.prediction
    assert lines[0] == f"plan auto: '{chosen.plan}'"
    assert lines[1:] == [f"- {reason}" for reason in chosen.plan.reasons]
    assert len(described) == 1


def test_auto_leaves_out_plans_that_cut_a_batch_that_has_to_be_whole(
    described: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = module.describe_config

    def mixing(config: TrainConfig, autocast: str) -> Described:
        return dataclasses.replace(describe(config, autocast), why_whole="the loss compares samples")

    monkeypatch.setattr(module, "describe_config", mixing)
    config = classic("auto")
    chosen, lines = choose(config, Predictor(config))
    assert (chosen.plan.dp, chosen.plan.micro_batches) == (1, 1)
    assert lines[-1] == "- plans that cut the batch are left out: the loss compares samples"
    assert described


_PAIRS = """
import torch

def build():
    return torch.nn.Linear(3, 2)

def rows(split="train"):
    return torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)

def batches(split="train"):
    return torch.utils.data.DataLoader(rows(), batch_size=8)

def mixing(out, batch):
    return torch.nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))

def mean(out, batch):
    return torch.nn.functional.cross_entropy(out, batch[1])

def broken(out, batch):
    raise ValueError("no loss")
"""


@pytest.mark.parametrize(("loss", "told"), [("mixing", "not a mean over samples"), ("mean", ""), ("broken", "")])
def test_a_loss_that_compares_samples_needs_its_batch_whole(loss: str, told: str, tmp_path: Path) -> None:
    name = f"some_{loss}_pairs"  # a module's name is taken once in a process
    (tmp_path / f"{name}.py").write_text(_PAIRS)
    source = "batches" if loss == "mean" else "rows"
    lines = [
        f'model = {{ target = "{name}:build" }}',
        f'data = {{ source = "{name}:{source}" }}',
        "optimizer = { lr = 0.1 }",
    ]
    lines += [f'train = {{ steps = 1, global_batch_size = 8, loss = "{name}:{loss}" }}']
    (tmp_path / "pairs.toml").write_text("\n".join(lines))
    config = load_config(tmp_path / "pairs.toml", plan="auto")
    assert [len(part) for part in example_batch(config, 4)] == [4, 4]  # of a loader whose batches have eight, too
    found = why_whole(config, example_batch(config, 8))
    assert told in found
    assert bool(told) is bool(found)


def test_a_part_of_a_cluster_is_whole_hosts(described: list[TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.CLUSTER_VARIABLE, "4x8xa100-80g")
    found = Predictor(classic("distributed")).predict(mw.Plan.parse("dp=12"))
    assert "rule: whole hosts, of 8 devices each" in found.why_not
    assert Predictor(classic("distributed")).predict(mw.Plan.parse("dp=16")).prediction is not None
    assert described


@pytest.mark.parametrize(("plan", "wanted"), [("auto,zero=3", {"zero": 3}), ("auto,pp=2", {"pp": 2})])
def test_what_stands_after_auto_is_kept(plan: str, wanted: dict[str, int], described: list[TrainConfig]) -> None:
    config = classic(plan, 4)
    chosen, _ = choose(config, Predictor(config))
    assert {name: getattr(chosen.plan, name) for name in wanted} == wanted
    assert described


def test_where_nothing_can_be_chosen_the_run_is_data_parallel_and_says_so(
    described: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_config: TrainConfig, _autocast: str) -> Described:
        raise ConfigError("the model needs values")

    monkeypatch.setattr(module, "describe_config", refuse)
    config = classic("auto")
    chosen, (line,) = choose(config, Predictor(config))
    assert chosen == config
    assert "data parallel" in line
    assert "the model needs values" in line
    assert described == []


@pytest.mark.parametrize(("variable", "can_measure"), [("none", True), ("4xa100-80g", False)])
def test_ranks_of_a_job_and_a_switched_off_planner_keep_data_parallel(
    variable: str, *, can_measure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.CLUSTER_VARIABLE, variable)
    config = classic("auto")
    chosen, (line,) = foresee(config, can_measure=can_measure)
    assert chosen == config
    assert "data parallel, since" in line
    assert foresee(classic("dp=2"), can_measure=can_measure)[1] == []


def test_a_plan_that_is_given_is_predicted_and_kept(described: list[TrainConfig]) -> None:
    config = classic("dp=2,zero=1")
    chosen, lines = foresee(config, can_measure=True)
    assert chosen.plan == config.plan
    assert chosen.plan.prediction is not None
    assert lines == []
    assert described


def test_a_prediction_beside_what_was_measured() -> None:
    plan = mw.make_plans(MODEL, load_cluster("2xa100-80g"), mw.TrainSpec(global_batch_size=8))[0]
    assert plan.prediction is not None
    step_s, peak = plan.prediction.step_s, plan.prediction.peak_bytes
    text = held_against(plan.prediction, step_s=2 * step_s, peak_bytes=peak / 2, sent_bytes=None)
    assert text.count(";") == 1
    assert "measured (2.00)" in text
    assert text.endswith("(0.50)")
