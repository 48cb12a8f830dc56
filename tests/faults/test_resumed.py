"""F21, F24, F26, F27, F31, F33 at the level of a run: stopped, killed, without room, damaged, shared; and what it ends with."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import trace_format
from tests.faults.jobs import trained
from tests.faults.shm_ranks import Zygote
from tests.faults.test_joined import CLEAN, env_of, free_port

from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.errors import CheckpointError, ConfigError, DirectoryInUseError, exit_code_of
from meshwright.train.config.load import load_config
from meshwright.train.data.order import epoch_order
from meshwright.train.events import read_events
from meshwright.train.launcher import run_training

STEPS, BATCH, SEED = 10, 8, 3  # the second epoch begins after step 7
CONFIG = f"""
model = {{ target = "tests.faults.jobs.trained:build" }}
data = {{ source = "tests.faults.jobs.trained:data", prefetch = 0 }}
optimizer = {{ lr = 0.02 }}
schedule = {{ kind = "cosine", warmup_steps = 2 }}
train = {{ steps = {STEPS}, global_batch_size = {BATCH}, seed = {SEED}, loss = "cross_entropy", name = "run", plan = "dp=2" }}
"""
DROPOUT = "model.kwargs.dropout=0.25"


def sample_of(step: int, rank: int = 1) -> int:
    """Return a sample that is read for a step of the first epoch, counted from 1, by one of two ranks."""
    order = epoch_order(trained.NUM_SAMPLES, SEED, 0, shuffle=True)
    return int(order[step * BATCH - (1 if rank else BATCH)])


def train(folder: Path, *settings: str, plan: str = "dp=2", resume: bool = False) -> int:
    """Run `meshwright train` in a folder and return its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "c.toml").write_text(CONFIG)
    with contextlib.chdir(folder):
        try:
            return run_training(load_config("c.toml", settings, plan=plan), resume=resume)
        except (CheckpointError, ConfigError, DirectoryInUseError) as error:
            return exit_code_of(error)


def interrupt(folder: Path, step: int, *words: str, rank: int = 1) -> None:
    """Have something happen while a rank reads its samples for a step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "harm").write_text(" ".join([str(sample_of(step, rank)), *words]))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "runs" / "run") if event["event"] == kind]


def losses(folder: Path) -> list[tuple[int, float, float, float]]:
    """Return what a run says of each of its steps, whoever took it."""
    return [(event["step"], event["loss"], event["grad_norm"], event["lr"]) for event in events(folder, "step")]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs" / "run" / "checkpoints").iterdir())


def state(folder: Path) -> dict[str, Any]:
    """Return what the last checkpoint holds: parameters, the optimizer's state, generators, the place in the data.

    Python's own generator is left out: a run does not seed it, and nothing here draws from it.
    """
    with OpenCheckpoint(folder / "runs" / "run" / "checkpoints" / f"step-{STEPS:08d}") as found:
        found.check()
        names = [name for name in found.manifest.tensors if not name.endswith("/python")]
        values: dict[str, Any] = {name: found.read(name).reshape(-1) for name in names}
        return values | {"loader": found.manifest.state["extra"]["loader"]}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert any(name.startswith("optimizer/") for name in one)
    assert any(name.startswith("random/") for name in one)
    different = [
        name
        for name, value in one.items()
        if (value != other[name] if name == "loader" else not torch.equal(value, other[name]))
    ]
    assert different == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a run that nothing happens to, under a plan and settings."""
    known: dict[tuple[str, ...], Path] = {}

    def run(*settings: str, plan: str = "dp=2") -> Path:
        key = (plan, *settings)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("undisturbed")
            assert train(known[key], *settings, plan=plan) == 0
        return known[key]

    return run


@pytest.mark.parametrize(("plan", "background"), [("dp=2", "true"), ("tp=2", "false")])
def test_a_run_that_was_asked_to_stop_goes_on_bit_by_bit(
    plan: str, background: str, tmp_path: Path, undisturbed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    # Dropout draws from generators that must go on, too.
    settings = [DROPOUT, "train.eval_every=2", "checkpoint.best=true", "checkpoint.keep=1"]
    settings.append(f"checkpoint.background={background}")
    interrupt(tmp_path, 6, "signal", "SIGTERM")
    assert train(tmp_path, *settings, plan=plan) == 75
    assert [event["step"] for event in events(tmp_path, "stopped")] == [6]
    assert (
        "after step 6 of 10; saved in runs/run/checkpoints/step-00000006\nfix: continue it: --resume"
        in capfd.readouterr().err
    )
    assert train(tmp_path, *settings, plan=plan, resume=True) == 0
    assert [event["step"] for event in events(tmp_path, "resumed")] == [6]
    whole = undisturbed(*settings, plan=plan)
    assert losses(tmp_path) == losses(whole)
    assert [step for step, *_ in losses(whole)] == list(range(1, STEPS + 1))
    assert_same(state(tmp_path), state(whole))
    evaluated = [[(e["step"], e["loss"]) for e in events(folder, "evaluated")] for folder in (tmp_path, whole)]
    assert evaluated[0] == evaluated[1]
    best = min(evaluated[1][1:], key=lambda row: row[1])[0]
    assert checkpoints(tmp_path) == checkpoints(whole) == sorted({f"step-{best:08d}", f"step-{STEPS:08d}"})


def test_a_run_goes_on_under_other_plans(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    whole = losses(undisturbed())
    interrupt(tmp_path / "stopped", 5, "signal", "SIGTERM")
    assert train(tmp_path / "stopped") == 75
    for plan in ("single", "dp=3,zero=3", "pp=2,micro_batches=2"):
        shutil.copytree(tmp_path / "stopped", tmp_path / plan)
        assert train(tmp_path / plan, plan=plan, resume=True) == 0
        found = losses(tmp_path / plan)
        assert found[:5] == whole[:5]
        assert [step for step, *_ in found] == [step for step, *_ in whole]
        for (_, loss, norm, lr), (_, wanted, wanted_norm, wanted_lr) in zip(found, whole, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
            assert lr == wanted_lr


def test_a_run_that_is_done_is_done_under_a_plan_that_waits_for_a_batch(
    tmp_path: Path, undisturbed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    # tp and pp know what a rank holds from the first batch on, and none comes.
    shutil.copytree(undisturbed(), tmp_path / "done")
    record = (tmp_path / "done" / "runs" / "run" / "record.json").read_bytes()
    assert train(tmp_path / "done", plan="tp=2", resume=True) == 0
    assert "all 10 steps were done before" in "".join(capfd.readouterr())
    assert (tmp_path / "done" / "runs" / "run" / "record.json").read_bytes() == record


@pytest.mark.parametrize("background", ["false", "true"])
def test_ranks_that_are_killed_start_again_from_the_newest_checkpoint(
    background: str, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    interrupt(tmp_path, 6, "signal", "SIGKILL")
    # Rank 0's clock says after each step that it is time.
    settings = [DROPOUT, "train.max_restarts=1", "checkpoint.every_minutes=1e-9", "checkpoint.keep=2"]
    settings.append(f"checkpoint.background={background}")
    assert train(tmp_path, *settings) == 0
    (told,) = events(tmp_path, "restarting")
    assert (told["exit_code"], told["step"], told["number"], told["most"]) == (11, 5, 1, 1)
    (resumed,) = events(tmp_path, "resumed")
    # Step 5's may be under way when the rank dies; step 4's is on the disk before that one begins.
    assert resumed["step"] in ((4, 5) if background == "true" else (5,))
    whole = undisturbed(DROPOUT)
    assert losses(tmp_path) == losses(whole)
    assert_same(state(tmp_path), state(whole))
    assert checkpoints(tmp_path) == ["step-00000009", "step-00000010"]


def test_a_damaged_checkpoint_is_skipped_said_and_set_aside(
    tmp_path: Path, undisturbed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path, 6, "signal", "SIGTERM")
    assert train(tmp_path, DROPOUT, "checkpoint.every_steps=4") == 75
    newest = tmp_path / "runs" / "run" / "checkpoints" / "step-00000006"
    file = newest / "rank-00001.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    assert train(tmp_path, DROPOUT, "checkpoint.keep=1", resume=True) == 0
    assert "skipped runs/run/checkpoints/step-00000006: " in capfd.readouterr().out
    (resumed,) = events(tmp_path, "resumed")
    assert resumed["step"] == 4
    assert [Path(row["path"]).name for row in resumed["skipped"]] == ["step-00000006"]
    assert "rank-00001.safetensors is damaged" in resumed["skipped"][0]["reason"]
    whole = undisturbed(DROPOUT)
    assert losses(tmp_path) == losses(whole)
    assert_same(state(tmp_path), state(whole))
    assert checkpoints(tmp_path) == ["skipped-step-00000006", "step-00000010"]

    file = tmp_path / "runs" / "run" / "checkpoints" / "step-00000010" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-5])
    assert train(tmp_path, DROPOUT, resume=True) == 14
    assert "no sound checkpoint is in runs/run/checkpoints" in capfd.readouterr().err


def test_what_decides_the_numbers_is_held_against_the_checkpoint(
    tmp_path: Path, undisturbed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed(), tmp_path, dirs_exist_ok=True)
    assert train(tmp_path, "train.seed=4", "optimizer.lr=0.5", resume=True) == 2
    shown = capfd.readouterr().err
    assert "\n  optimizer.lr: 0.02 in the checkpoint, 0.5 now\n  train.seed: 3 in the checkpoint, 4 now\n" in shown
    assert "--set optimizer.lr=0.02 --set train.seed=3" in shown
    assert train(tmp_path, "train.steps=12", resume=True) == 0
    assert [step for step, *_ in losses(tmp_path)] == list(range(1, 13))
    assert losses(tmp_path)[:STEPS] == losses(undisturbed())
    assert train(tmp_path, "train.steps=9", resume=True) == 2
    assert "fix: --set train.steps=12" in capfd.readouterr().err


@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_disk_without_room(
    policy: str, tmp_path: Path, undisturbed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    # A file of one rank may not grow over 200 bytes, from the step after the first checkpoint to the one after the second.
    interrupt(tmp_path, 3, "limit", f"200:{sample_of(5)}")
    settings = [DROPOUT, "checkpoint.every_steps=2"]
    code = train(tmp_path, *settings, f"checkpoint.on_error={policy}")
    shown = capfd.readouterr()
    text = r"cannot write runs/run/checkpoints/.draft-00000004-.*/rank-00001.safetensors, [0-9]+ bytes: File too large; [0-9]+ "
    text += "bytes are free"
    if policy == "stop":
        assert code == 13
        assert checkpoints(tmp_path) == ["step-00000002"]
        with OpenCheckpoint(tmp_path / "runs" / "run" / "checkpoints" / "step-00000002") as before:
            before.check()
        assert_matches(text, shown.err)
        (tmp_path / "harm").unlink()
        assert train(tmp_path, *settings, resume=True) == 0
    else:
        assert code == 0
        (failed,) = events(tmp_path, "save_failed")
        assert failed["step"] == 4
        assert_matches("warning: step 4 was not saved: " + text, shown.out)
        assert [event["step"] for event in events(tmp_path, "saved")] == [2, 6, 8, 10]
    assert losses(tmp_path) == losses(undisturbed(DROPOUT))
    assert checkpoints(tmp_path) == ["step-00000006", "step-00000008", "step-00000010"]


@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_disk_without_room_in_the_background(
    policy: str, tmp_path: Path, undisturbed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    # A file of one rank may not grow over 200 bytes from step 5 on, and its notes are larger, too.
    # Step 4's save may be over by then, or be about to write the one or the other.
    interrupt(tmp_path, 5, "limit", "200")
    settings = [DROPOUT, "checkpoint.every_steps=2", "checkpoint.background=true"]
    code = train(tmp_path, *settings, f"checkpoint.on_error={policy}")
    shown = capfd.readouterr()
    text = r"cannot write runs/run/checkpoints/.draft-0000000.-.*/(rank-00001.safetensors, [0-9]+ bytes|note-00001.*): File too"
    saved = [event["step"] for event in events(tmp_path, "saved")]
    assert saved in ([2], [2, 4])
    assert checkpoints(tmp_path) == [f"step-{step:08d}" for step in saved]
    if policy == "stop":
        assert code == 13
        assert_matches(text, shown.err)
        assert train(tmp_path, *settings, resume=True) == 0
        assert checkpoints(tmp_path) == ["step-00000006", "step-00000008", "step-00000010"]
    else:
        assert code == 0
        assert saved + [event["step"] for event in events(tmp_path, "save_failed")] == [2, 4, 6, 8, 10]
        assert_matches("warning: step 8 was not saved: " + text, shown.out)
    assert losses(tmp_path) == losses(undisturbed(DROPOUT))


def test_a_trace_without_room_is_told_and_the_run_goes_on(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    # A file of the rank that writes the trace after step 4 may not grow over 200 bytes, from that step to the sixth.
    interrupt(tmp_path, 4, "limit", f"200:{sample_of(6, rank=0)}", rank=0)
    assert train(tmp_path, DROPOUT, "train.trace='3-4'") == 0
    (failed,) = events(tmp_path, "trace_failed")
    assert failed["step"] == 4
    assert_matches(r"cannot write runs/run/.trace.json\.[0-9a-f]+\.partial: File too large", failed["text"])
    assert list((tmp_path / "runs" / "run").glob("*trace*")) == []
    assert losses(tmp_path) == losses(undisturbed(DROPOUT))


def test_a_trace_of_a_run_that_is_killed_in_it(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / ".trace.json.0123.partial").touch()  # as of a rank that was killed while it wrote
    interrupt(tmp_path, 4, "signal", "SIGKILL")
    settings = [
        DROPOUT,
        "train.trace='3-5'",
        "train.max_restarts=1",
        "checkpoint.every_minutes=1e-9",
        "checkpoint.keep=1",
    ]
    assert train(tmp_path, *settings) == 0
    kinds = [event["event"] for event in read_events(folder) if event["event"] in ("traced", "restarting")]
    assert kinds == ["restarting", "traced"]
    # The killed ranks' part of the trace is lost with them; what was taken again is whole.
    assert trace_format.check_file(folder / "trace.json") == []
    assert events(tmp_path, "traced")[0]["steps"] == [4, 5]
    assert [path.name for path in folder.glob("*trace*")] == ["trace.json"]
    assert losses(tmp_path) == losses(undisturbed(DROPOUT))


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_a_second_run_in_the_folder_is_kept_out_and_the_first_does_not_notice(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    interrupt(tmp_path, 4, "run", "c.toml")
    assert train(tmp_path, DROPOUT) == 0
    second = json.loads((tmp_path / "second").read_text())
    assert second["code"] == 16, second["err"]
    assert "DirectoryInUseError: another run, process " in second["err"]
    assert losses(tmp_path) == losses(undisturbed(DROPOUT))


JOINED = """
import json, os, sys
os.chdir(os.path.dirname(os.path.abspath(__file__)))
from meshwright import cli
sys.argv = ["meshwright", *json.loads(sys.argv[1])]
sys.stdout = sys.stderr
cli.main()
"""


@pytest.mark.long
def test_a_run_goes_on_as_ranks_of_a_job(zygote: Zygote, tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    interrupt(tmp_path, 6, "signal", "SIGTERM")
    assert train(tmp_path, DROPOUT) == 75
    (tmp_path / "joined.py").write_text(JOINED)
    port = free_port()
    words = json.dumps(["train", "c.toml", "--set", DROPOUT, "--resume"])
    environments = [env_of(rank, 2, port) for rank in (0, 1)]
    args = {"path": str(tmp_path / "joined.py"), "arguments": [words], "environments": environments, "without": CLEAN}
    with zygote.ranks("run_program", 2, timeout_s=100.0, finalizes=True, **args) as ranks:
        assert ranks.hear_all("exit") == [0, 0]
    whole = undisturbed(DROPOUT)
    assert [event["step"] for event in events(tmp_path, "resumed")] == [6]
    assert losses(tmp_path) == losses(whole)
    assert_same(state(tmp_path), state(whole))


def test_a_run_begins_with_pretrained_weights_and_goes_on_without_them(tmp_path: Path) -> None:
    torch.manual_seed(17)
    weights = {name: value.contiguous() for name, value in trained.build().state_dict().items()}
    runs = {}
    for name, plan in (("first", "dp=2"), ("second", "dp=2,zero=3,whole_below=1")):
        folder = tmp_path / name
        (folder / "weights").mkdir(parents=True)
        save_file(weights, folder / "weights" / "model.safetensors")
        assert train(folder, "model.pretrained=weights", "train.steps=2", plan=plan) == 0
        shutil.rmtree(folder / "weights")  # a run that goes on has its own
        assert train(folder, "model.pretrained=weights", "train.steps=2", plan=plan) == 2
        assert train(folder, "train.steps=4", plan=plan, resume=True) == 0
        runs[name] = losses(folder)
    assert len(runs["first"]) == 4
    for mine, other in zip(runs["first"], runs["second"], strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    plain = tmp_path / "plain"
    assert train(plain, "train.steps=2") == 0
    assert losses(plain)[0] != pytest.approx(runs["first"][0], rel=1e-3)
