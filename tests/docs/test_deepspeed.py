"""One real run: `meshwright train --plan ds.json` on two ranks, with ZeRO, accumulation, DeepSpeed's optimizer and warm-up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.docs.here import run_here

from meshwright.plan.deepspeed.reader import Settings, parse_text, read_deepspeed

pytestmark = pytest.mark.usefixtures("templates")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "mlp_classic.toml"
SMALL = [
    "model.kwargs={input_size = 16, hidden_size = 32, middle_size = 16, output_size = 16}",
    "data.kwargs={num_samples = 64, input_size = 16, output_size = 16}",
    "train.steps=6",
    "train.eval_batches=0",
]


# The same training in Meshwright's own words.
ALIKE = [
    "train.global_batch_size=32",
    "train.max_grad_norm=1.0",
    "optimizer.name=adamw",
    "optimizer.lr=0.003",
    "optimizer.betas=[0.9, 0.95]",
    "schedule.kind=WarmupLR",
    "schedule.warmup_steps=4",
    "train.name=alike",
]


def run_train(folder: Path, plan: str, *words: str) -> tuple[list[str], list[dict]]:
    """The lines that a run prints, and its steps."""
    code, out, error = run_here(["train", str(CONFIG), "--plan", plan, *words], folder)
    assert code == 0, error
    run = folder / "runs" / ("mlp_classic" if plan.endswith(".json") else "alike")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return out.splitlines(), [event for event in events if event["event"] == "step"]


def settings_of(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_the_example_trains_and_shows_its_table(tmp_path: Path) -> None:
    lines, steps = run_train(tmp_path, "ds_config.json", "--devices", "2", *settings_of(SMALL))
    assert lines[0].split() == ["key", "given", "resolved", "why"]
    table = {line.split()[0]: line for line in lines[1:]}
    assert "train.global_batch_size=32" in table["train_batch_size"]
    assert "replaces" in table["train.global_batch_size"]
    assert [line.split()[1] for line in lines if line.startswith("step ") and "/" in line.split()[1]] == [
        *("2/6", "4/6", "6/6")
    ]
    record = json.loads((tmp_path / "runs" / "mlp_classic" / "record.json").read_text())
    assert (record["plan"]["dp"], record["plan"]["zero"], record["plan"]["micro_batches"]) == (2, 1, 2)
    assert record["config"]["plan_rows"]
    assert [step["num_samples"] for step in steps] == [32] * 6
    # Linear from 0 to 0.003 over four steps, one step late, as DeepSpeed has it.
    assert [step["lr"] for step in steps] == pytest.approx([0, 0, 0.00075, 0.0015, 0.00225, 0.003])
    _, alike = run_train(tmp_path, "single", *settings_of(SMALL + ALIKE))
    assert len({step["loss"] for step in steps}) == 6
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in alike], rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx([step["grad_norm"] for step in alike], rel=1e-4)


def test_zero_3_in_a_pipeline_which_deepspeed_refuses_trains(tmp_path: Path) -> None:
    path = ROOT / "tests" / "data" / "ds_pipeline_zero3.json"
    small = [setting.replace("num_samples = 64", "num_samples = 256") for setting in SMALL]
    words = settings_of([*small, "train.steps=2"])
    lines, steps = run_train(tmp_path, str(path), "--devices", "2", *words)
    table = {line.split()[0]: line for line in lines if line}
    assert "DeepSpeed refuses ZeRO-3 with a pipeline" in table["zero_optimization.stage"]
    assert "recompute=full" in table["pipeline.activation_checkpointing"]
    assert "pp=2" in table["pipeline.stages"]
    record = json.loads((tmp_path / "runs" / "mlp_classic" / "record.json").read_text())
    assert (record["plan"]["pp"], record["plan"]["zero"], record["plan"]["micro_batches"]) == (2, 3, 8)
    assert [step["num_samples"] for step in steps] == [128, 128]
    alike = ["train.global_batch_size=128", "train.max_grad_norm=1.0", "train.name=alike"]
    _, alike = run_train(tmp_path, "single", *settings_of([*small, "train.steps=2", *alike]))
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in alike], rel=1e-5)


@pytest.mark.parametrize(
    "path", [ROOT / "examples" / "ds_config.json", ROOT / "tests" / "data" / "ds_pipeline_zero3.json"]
)
def test_files_of_the_documentation_are_read(path: Path) -> None:
    settings = Settings(global_batch_size=32, lr=0.003, steps=10, hidden_size=64)
    resolution = read_deepspeed(parse_text(path.read_text(), path.name), settings=settings, num_devices=4)
    assert resolution.plan.num_devices == 4
