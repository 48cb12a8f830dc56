"""transformers' Trainer under a plan where a save was interrupted, a file is damaged, or ranks would not go the same way."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.parity.jobs import trainer_fault_jobs as jobs

import meshwright as mw
from meshwright import testing
from meshwright.errors import CheckpointError, StorageError, UserCodeError
from meshwright.integrations import one_run, sealed

PLANS = ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2"]


def run(plan: str, directory: Path, *args: Any) -> list[Any]:
    return testing.run_ranks(jobs.train, 2, plan, str(directory), *args)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    directory = tmp_path_factory.mktemp("saved")
    found = run("dp=2", directory)[0]
    assert found["saved"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    shutil.rmtree(directory / "checkpoint-6")
    return directory, found["losses"]


@pytest.mark.parametrize(
    "how", ["interrupted", "cut state", "cut weights", "another's schedule", "no generators", "flipped part"]
)
def test_a_checkpoint_that_is_not_whole_is_passed_over(saved: Any, tmp_path: Path, how: str) -> None:
    directory, losses = saved
    shutil.copytree(directory, tmp_path / "run")
    jobs.harm(tmp_path / "run" / "checkpoint-4", how)
    for outcome in testing.run_outcomes(
        jobs.train, 2, "dp=2", str(tmp_path / "run"), str(tmp_path / "run/checkpoint-4")
    ):
        assert isinstance(outcome.error, CheckpointError)
        assert "resume_from_checkpoint=True" in str(outcome.error.fix)
    for found in run("dp=2", tmp_path / "run", True):
        assert found["steps"] == 6
        assert {step: found["losses"][step] for step in range(3, 7)} == pytest.approx(
            {step: losses[step] for step in range(3, 7)}, rel=1e-6
        )


def test_where_none_is_whole_each_is_named(saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path / "run")
    for name in ("checkpoint-2", "checkpoint-4"):
        jobs.harm(tmp_path / "run" / name, "interrupted")
    for outcome in testing.run_outcomes(jobs.train, 2, "tp=2", str(tmp_path / "run"), True):
        assert isinstance(outcome.error, CheckpointError)
        assert "checkpoint-2 cannot" in str(outcome.error)
        assert "checkpoint-4 cannot" in str(outcome.error)


def test_a_name_that_is_saved_anew_is_unfinished_until_it_is_whole(saved: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(saved[0] / "checkpoint-4", checkpoint)
    assert sealed.find_fault(checkpoint) is None
    sealed.break_seal(checkpoint)
    assert "interrupted" in str(sealed.find_fault(checkpoint))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("name", "value"), [("save_steps", 3), ("eval_steps", 3), ("max_grad_norm", 0.01), ("load_best_model_at_end", True)]
)
def test_arguments_that_depend_on_the_rank_are_refused(tmp_path: Path, plan: str, name: str, value: Any) -> None:
    own = {name: value, **({"metric_for_best_model": "loss"} if name.startswith("load") else {})}
    for outcome in testing.run_outcomes(jobs.train, 2, plan, str(tmp_path), None, None, own):
        assert isinstance(outcome.error, mw.ApplyError)
        assert f"TrainingArguments: {name} is" in str(outcome.error)


def test_what_a_rank_logs_is_its_own_matter(tmp_path: Path) -> None:
    first, second = run("dp=2", tmp_path, None, None, {"run_name": "mine", "log_level": "error", "logging_steps": 2})
    assert first["losses"] == second["losses"]
    assert first["steps"] == second["steps"] == 6


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_callback_of_one_rank_asks_for_all(tmp_path: Path, plan: str, rank: int) -> None:
    for found in run(plan, tmp_path / "stop", None, None, None, (rank, 3, "should_training_stop")):
        assert found["steps"] == 3
    for found in run(plan, tmp_path / "save", None, None, None, (rank, 3, "should_save")):
        assert "checkpoint-3" in found["saved"]
    for found in run(plan, tmp_path / "look", None, None, None, (rank, 3, "should_evaluate")):
        assert found["evaluated"] == [2, 3, 4, 6]


@pytest.mark.parametrize("plan", PLANS)
def test_metrics_that_depend_on_the_rank_are_refused(tmp_path: Path, plan: str) -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, plan, str(tmp_path), None, None, None, None, "by rank"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "the evaluation's 'eval_size' is" in str(outcome.error)


@pytest.mark.parametrize("plan", PLANS)
def test_an_error_in_a_callback_of_one_rank_is_told_to_the_others(tmp_path: Path, plan: str) -> None:
    first, second = testing.run_outcomes(jobs.train, 2, plan, str(tmp_path), None, None, None, (1, 3, "raise"))
    assert isinstance(second.error, ValueError)
    assert isinstance(first.error, UserCodeError)
    assert first.error.rank == 1
    assert "the callback's own" in str(first.error)


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No space left"), sealed.written(tmp_path):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(ValueError, match="of a model"), sealed.written(tmp_path):
        raise ValueError("of a model's own")


@pytest.mark.parametrize("resume", [None, True])
def test_a_folder_in_which_another_run_trains_is_refused(saved: Any, tmp_path: Path, resume: bool | None) -> None:
    shutil.copytree(saved[0], tmp_path / "run")
    with one_run.holding(cast("Any", types.SimpleNamespace(rank=0, world_size=1)), arguments(tmp_path / "run")):
        for outcome in testing.run_outcomes(jobs.train, 2, "dp=2", str(tmp_path / "run"), resume):
            assert isinstance(outcome.error, mw.DirectoryInUseError)
        with pytest.raises(mw.DirectoryInUseError):  # a rank that does not save itself goes with the first one
            run("dp=2", tmp_path / "run", resume, None, {"save_strategy": "no"})
        run("dp=2", tmp_path / "other", None, {"max_steps": 1})
    found = run("dp=2", tmp_path / "run", True)[0]
    assert found["losses"][6] == pytest.approx(saved[1][6], rel=1e-6)


def test_a_worker_that_outlives_its_run_does_not_hold_the_folder(tmp_path: Path) -> None:
    lines = (
        "import os, types",
        "from meshwright.integrations import one_run",
        f"args = types.SimpleNamespace(output_dir={str(tmp_path)!r}, save_strategy='steps')",
        "one_run.holding(types.SimpleNamespace(rank=0, world_size=1), args).__enter__()",
        "worker = os.fork()",
        "if worker == 0: os.read(0, 1); os._exit(0)",
        "os._exit(0)",
    )
    with subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 0
        with one_run.holding(cast("Any", types.SimpleNamespace(rank=0, world_size=1)), arguments(tmp_path)):
            assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("plan", ["dp=2,zero=3,whole_below=1", "tp=2"])
def test_fixes_name_what_the_user_of_a_trainer_has(tmp_path: Path, plan: str) -> None:
    for outcome in testing.run_outcomes(jobs.read_in_a_callback, 2, plan, str(tmp_path), "plain"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "with trainer.parallel.whole_parameters():" in str(outcome.error.fix)
    whole = testing.run_ranks(jobs.read_in_a_callback, 2, plan, str(tmp_path), "whole")
    (alone,) = testing.run_ranks(jobs.read_in_a_callback, 1, "dp=1", str(tmp_path), "whole")
    assert whole[0] == whole[1] == pytest.approx(alone, rel=1e-5)
    for outcome in testing.run_outcomes(jobs.read_in_a_callback, 2, plan, str(tmp_path), "clips"):
        fix = str(getattr(outcome.error, "fix", ""))
        assert "trainer.parallel.full_gradients()" in fix
        assert "max_grad_norm= of TrainingArguments clips" in fix


def arguments(folder: Path) -> types.SimpleNamespace:
    return types.SimpleNamespace(output_dir=str(folder), save_strategy="steps")


def test_weights_that_were_cut_into_shards_afterwards_are_no_damage(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / sealed.STATE).write_text("{}")
    sealed.seal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert sealed.find_fault(tmp_path) == "'model.safetensors' is missing"
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert sealed.find_fault(tmp_path) is None
