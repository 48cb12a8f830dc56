"""A DeepSpeed configuration in a training's place for a plan: who wins, what the table shows, what compare makes of it."""

import io
import json
from pathlib import Path

import pytest

from meshwright.compare import run_plans
from meshwright.errors import ConfigError
from meshwright.spec import Plan
from meshwright.train.config import checks
from meshwright.train.config.deepspeed import require_same_training, show_rows
from meshwright.train.config.load import load_config
from meshwright.train.config.types import ScheduleConfig, TrainConfig
from meshwright.train.optim import lr_fraction

EXAMPLES = Path(__file__).parents[3] / "examples"

MINIMAL = """
[model]
target = "user_model:build"
kwargs = { hidden_size = 64 }

[data]
source = "python-stdlib"

[optimizer]
lr = 0.1
weight_decay = 0.3

[train]
steps = 20
global_batch_size = 8
max_grad_norm = 0.5
"""

DS = """{
  // what a user of DeepSpeed has
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "steps_per_print": 5,
  "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
}"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "user_model.py").write_text("def build(hidden_size): ...\n")
    (tmp_path / "c.toml").write_text(MINIMAL)
    (tmp_path / "ds.json").write_text(DS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "visible_devices", lambda: (2, "core"))
    return tmp_path


def load(folder, *overrides, plan="ds.json", **kwargs):
    return load_config(folder / "c.toml", overrides, plan=plan, **kwargs)


def rows(config):
    return {row[0]: row[1:] for row in config.plan_rows}


def test_the_file_sets_the_plan_and_the_training(folder):
    config = load(folder)
    plan = config.plan
    assert str(plan) == "dp=2,zero=3,micro_batches=2,micro_batch_size=4,whole_below=2560"
    assert plan.reasons == ("read from the DeepSpeed configuration ds.json",)
    assert (config.train.global_batch_size, config.train.print_every) == (16, 5)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adamw", 0.01, 0.3)
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("WarmupLR", 4)
    assert config.train.max_grad_norm == 0.5
    table = rows(config)
    assert table["gradient_clipping"][-1] == "not given: train.max_grad_norm of the configuration"
    assert table["train.global_batch_size"] == ("-", "16", "replaces 8 of the configuration")
    assert table["optimizer.lr"][-1] == "replaces 0.1 of the configuration"
    assert table["devices"][1:] == ("2 = dp 2", "this machine's cores")
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
    # The same where the configuration itself names the file.
    assert load(folder, "train.plan=ds.json", plan=None) == config.model_copy(
        update={"train": config.train.model_copy(update={"plan": "ds.json"})}
    )


def test_devices_come_from_the_command_line_or_the_file(folder):
    assert load(folder, devices=4).plan.dp == 4
    assert rows(load(folder, devices=4))["devices"][0] == "4"
    # The configuration's own number was meant for its own plan; it is as good a guess as this machine's.
    assert load(folder, "train.devices=3").plan.dp == 3
    config = load(folder, devices=4)
    assert "uses 4 devices, there are 2 cores" in config.notes[0]


def test_set_and_the_file_must_not_disagree(folder):
    with pytest.raises(ConfigError, match=r"ds\.json says optimizer\.lr = 0\.01, and --set says 0\.2") as caught:
        load(folder, "optimizer.lr=0.2")
    assert caught.value.fix == "leave out --set optimizer.lr"
    assert load(folder, "optimizer.lr=0.01").optimizer.lr == 0.01
    # "auto", and what the file leaves open, take what is set.
    config = load(folder, "optimizer.weight_decay=0.4", "train.max_grad_norm=0.7", "train.steps=30")
    assert (config.optimizer.weight_decay, config.train.max_grad_norm, config.train.steps) == (0.4, 0.7, 30)


def test_a_saved_plan_is_told_apart(folder):
    (folder / "p.json").write_text(Plan.parse("dp=2,micro_batches=2").to_json())
    config = load(folder, plan="p.json")
    assert config.plan.micro_batches == 2
    assert config.plan_rows == ()
    assert config.train.global_batch_size == 8
    (folder / "p.json").write_text('{"format": "meshwright.train", "version": 1, "global_batch_size": 3}')
    with pytest.raises(ConfigError, match=r"expected 'meshwright\.plan'"):
        load(folder, plan="p.json")
    (folder / "p.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"p\.json: there is no key of a DeepSpeed configuration in it"):
        load(folder, plan="p.json")
    (folder / "p.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ConfigError, match=r'p\.json: unknown key "hidden_size"'):
        load(folder, plan="p.json")


def test_the_width_of_a_hugging_face_model_is_found(folder):
    (folder / "config.json").write_text('{"hidden_sizes": [32, 48], "model_type": "x"}')
    tables = {"model": {"target": "hf:."}}
    for written, width in (('{"hidden_sizes": [32, 48]}', 48), ('{"hidden_size": 16}', 16), ("{}", None), ("x", None)):
        (folder / "config.json").write_text(written)
        resolution = checks.read_deepspeed(
            json.loads(DS.replace("// what a user of DeepSpeed has", "").replace("},\n}", "}}")),
            settings=checks.settings_of(tables, folder),
            num_devices=2,
        )
        assert resolution.plan.whole_below == 10 * width * 4 if width else 400_000


def test_compare_leaves_the_training_as_it_is(folder):
    changes = {"train": {"global_batch_size": 16, "print_every": 5}, "optimizer": {"lr": 0.01}}
    sections = {"train": {"global_batch_size": 8}, "optimizer": {"lr": 0.1}}
    with pytest.raises(ConfigError, match=r"train\.global_batch_size = 16, the configuration says 8") as caught:
        require_same_training("ds.json", changes, sections)
    assert caught.value.fix == "--set train.global_batch_size=16"
    sections["train"]["global_batch_size"] = 16
    assert require_same_training("ds.json", changes, sections).endswith("ds.json would set optimizer.lr = 0.01")
    sections["optimizer"]["lr"] = 0.01
    assert require_same_training("ds.json", changes, sections) is None


def test_compare_takes_a_file_beside_other_plans(folder):
    base = load_config(folder / "c.toml", ["train.global_batch_size=16"])
    runs = run_plans.Runs(base, ["single", "ds.json"], None, None)
    assert [str(job.plan)[:11] for job in runs._jobs] == ["single", "dp=2,zero=3"]
    assert runs._jobs[1].config.optimizer.lr == 0.1
    (note,) = [note for note in runs._notes if "ds.json" in note]
    assert "ds.json would set optimizer.lr = 0.01, schedule.kind" in note
    with pytest.raises(ConfigError, match=r"the plan 'ds\.json': .* the configuration says 32"):
        run_plans.Runs(load_config(folder / "c.toml", ["train.global_batch_size=32"]), ["ds.json"], None, None)


def test_the_ranks_of_a_job_are_the_devices(folder, monkeypatch):
    monkeypatch.setattr(checks, "visible_devices", lambda: (6, "rank"))
    config = load(folder, "train.devices=3")
    assert config.plan.dp == 6
    assert rows(config)["devices"] == ("6", "6 = dp 6", "this job's ranks")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_table_is_framed_on_a_terminal_only(folder, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    table = load(folder).plan_rows
    plain, framed = io.StringIO(), Terminal()
    show_rows(table, plain)
    show_rows(table, framed)
    lines = plain.getvalue().splitlines()
    assert lines[0].split() == ["key", "given", "resolved", "why"]
    assert len(lines) == 1 + len(table)
    assert lines[1].split() == ["train_micro_batch_size_per_gpu", "4", "micro_batch_size=4", "given"]
    assert "┏" in framed.getvalue()
    assert "micro_batch_size=4" in framed.getvalue()
    nothing = io.StringIO()
    show_rows((), nothing)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    show_rows(table, nothing)  # the job's first rank shows it
    assert nothing.getvalue() == ""


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            {"kind": "WarmupLR", "warmup_steps": 4, "warmup_type": "log"},
            [0, 0, 0.5, 0.792481, 1, 1, 1, 1, 1, 1, 1, 1],
        ),
        (
            {"kind": "WarmupLR", "warmup_steps": 4, "start_fraction": 0.2},
            [0.2, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1, 1],
        ),
        (
            {"kind": "WarmupDecayLR", "warmup_steps": 3, "start_fraction": 0.2, "total_steps": 9},
            [0.2, 0.2, 0.466667, 0.733333, 1, 0.866667, 0.733333, 0.6, 0.466667, 0.333333, 0.2, 0.2],
        ),
        (
            {"kind": "WarmupCosineLR", "warmup_steps": 3, "start_fraction": 0.2, "min_lr_fraction": 0.05, "warmup_type": "log"},
            [0, 0.2, 0.704744, 1, 0.936362, 0.7625, 0.525, 0.2875, 0.113638, 0.05, 0.05, 0.05],
        ),
    ],
)  # fmt: skip
def test_learning_rates_are_deepspeeds(schedule, expected):
    # Printed by deepspeed 0.19.8's own classes, over SGD with lr 0.1, as shares of it.
    found = [lr_fraction(ScheduleConfig(**schedule), step, 9) for step in range(12)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_deepspeeds_words_are_for_its_kinds(folder):
    with pytest.raises(ConfigError, match=r"schedule\.warmup_type = 'log' with schedule\.kind = 'cosine'"):
        load(folder, "schedule.kind=cosine", "schedule.warmup_type=log", plan="single")
