"""cli.py and train/launcher.py: messages, exit codes, and what the launching process never imports."""

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from meshwright import __version__, cli
from meshwright.errors import (
    ConfigError,
    LostPeerError,
    NonFiniteError,
    RankNote,
    StoppedOnRequest,
    UserCodeError,
    WorkerKilledError,
)
from meshwright.ranks import join
from meshwright.train import launcher, session
from meshwright.train.config.load import load_config
from meshwright.train.events import read_events

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_python.toml"


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_main(monkeypatch, capsys, *arguments):
    """Run the command as the entry point does; returns (exit code, standard output, standard error)."""
    monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err


def test_version(monkeypatch, capsys):
    assert run_main(monkeypatch, capsys, "--version") == (0, f"meshwright {__version__}\n", "")


def test_usage_errors_exit_2(monkeypatch, capsys):
    assert run_main(monkeypatch, capsys, "trian")[0] == 2
    assert run_main(monkeypatch, capsys, "train")[0] == 2


def test_config_errors_are_one_message_in_time_without_torch(in_tmp):
    # The real command, with a torch that cannot be imported.
    (in_tmp / "torch.py").write_text("raise SystemExit('torch was imported')")
    (in_tmp / "c.toml").write_text("[train]\nstepz = 1\n")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", "c.toml"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=in_tmp,
    )
    assert time.monotonic() - began < 20  # 0.6 s where nothing else runs
    assert done.returncode == 2
    assert "c.toml:2: unknown key 'train.stepz' (did you mean 'steps'?)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "torch was imported" not in done.stderr + done.stdout
    assert not (in_tmp / "runs").exists()


def test_schedule_is_drawn_without_torch():
    code = (
        "import sys; sys.argv = ['meshwright', 'schedule', '--stages', '2', '--micro-batches', '3', '--kind', 'gpipe']\n"
        "from meshwright import cli\n"
        "try: cli.main()\n"
        "except SystemExit as left: sys.exit(99 if 'torch' in sys.modules else left.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_resume_is_refused_clearly(monkeypatch, capsys):
    code, _, err = run_main(monkeypatch, capsys, "train", str(EXAMPLE), "--resume")
    assert code == 2
    assert "checkpoints are not in this version" in err


def test_notes_come_before_the_run_and_its_code_is_ours(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "run_training", lambda config: 75)
    code, _, err = run_main(monkeypatch, capsys, "train", str(EXAMPLE), "--plan", "dp=32")
    assert code == 75
    assert "warning: the plan 'dp=32' uses 32 devices" in err


def test_help_names_every_command():
    text = CliRunner().invoke(cli.app, ["--help"]).output
    for command in ("train", "compare", "verify", "schedule"):
        assert command in text


# -- the launching side, with ranks that are made up ------------------------------------------------------------------


def step_event(number, **changes):
    numbers = {"samples_per_s": 1.0, "tokens_per_s": 1.0, "seconds": 0.1, "step_seconds": 0.1, "eta_s": 1.0, "lr": 0.1}
    counts = {"num_samples": 2, "num_tokens": 2, "peak_memory_bytes": 10, "skipped": False}
    return {"event": "step", "step": number, "steps": 6, "loss": 1.0, "grad_norm": 1.0} | numbers | counts | changes


def fake_launch(events=(), error=None, stopped=False):
    def launch(fn, num_ranks, config_json, *, threads_per_rank, on_event):
        for rank, event in events:
            on_event(rank, event)
        if error is not None:
            raise error
        sent = {"dp": 100}
        return [
            {"rank": r, "step": 6, "stopped": stopped, "peak_memory_bytes": 10 + r, "sent_bytes": sent}
            for r in range(num_ranks)
        ]

    return launch


@pytest.fixture
def run(in_tmp, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(**kwargs):
        monkeypatch.setattr(launcher, "launch", fake_launch(**kwargs))
        code = launcher.run_training(load_config(EXAMPLE, ["train.name=my run"]))
        return code, capsys.readouterr()

    return run


def test_a_finished_run_leaves_events_and_a_record(run, in_tmp):
    code, _ = run(events=[(0, step_event(number, seconds=number / 10)) for number in range(1, 7)])
    assert code == 0
    folder = in_tmp / "runs" / "my run"
    assert [event["step"] for event in read_events(folder)] == [1, 2, 3, 4, 5, 6]
    from meshwright.spec import RunRecord

    record = RunRecord.from_json((folder / "record.json").read_text())
    assert str(record.plan) == "dp=2"
    assert record.config["train"]["steps"] == 330
    measured = record.measurement
    assert measured.step_seconds == (0.4, 0.5, 0.6)  # the first three warm up
    assert (measured.num_samples, measured.peak_memory_bytes, dict(measured.sent_bytes)) == (6, 11, {"dp": 100})


def test_a_stop_says_where_and_that_nothing_was_saved(run):
    code, shown = run(stopped=True)
    assert code == 75
    assert "stopped on request after step 6 of 330; nothing was saved" in shown.err
    code, shown = run(events=[(0, step_event(4))], error=StoppedOnRequest("x"))
    assert code == 75
    assert "after step 4 of 330" in shown.err


def noted(error, note):
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (
            noted(ValueError("bad\x1b[2J picture\nmore"), RankNote("the other one's words", rank=1)),
            10,
            "FATAL run=my_run rank=1 step=3 phase=load cause=ValueError: bad picture",
        ),
        (
            UserCodeError("rank 1 raised Odd: x", rank=1, traceback_text="Traceback of Odd"),
            10,
            "FATAL run=my_run rank=1 step=3 phase=load cause=UserCodeError: rank 1 raised Odd: x",
        ),
        (
            WorkerKilledError("it is gone", rank=0, step=2, phase="backward"),
            11,
            "FATAL run=my_run rank=0 step=2 phase=backward cause=WorkerKilledError: it is gone",
        ),
        (
            LostPeerError("rank 3 of 4 waited at step 9, phase sleep"),  # the wording says nothing
            12,
            "FATAL run=my_run rank=unknown step=1 phase=run cause=LostPeerError: rank 3 of 4 waited at step 9, phase sleep",
        ),
        (
            LostPeerError("all_reduce failed"),
            12,
            "FATAL run=my_run rank=unknown step=1 phase=run cause=LostPeerError: all_reduce failed",
        ),
        (NonFiniteError("NaN", rank=1), 15, "FATAL run=my_run rank=1 step=3 phase=load cause=NonFiniteError: NaN"),
        (
            KeyboardInterrupt(),
            130,
            "FATAL run=my_run rank=unknown step=1 phase=run cause=KeyboardInterrupt",
        ),
    ],
)
def test_a_failure_ends_with_a_line_for_machines(run, in_tmp, error, code, last):
    failed = {"event": "failed", "rank": 1, "step": 3, "phase": "load", "traceback": "Traceback of rank 1"}
    got, shown = run(events=[(0, step_event(1)), (1, failed)], error=error)
    assert got == code
    lines = shown.err.splitlines()
    assert lines[-1] == last
    if "rank=1" in last:
        assert lines[0] == "Traceback of rank 1"
    if isinstance(error, KeyboardInterrupt):
        assert lines == [last]
    assert read_events(in_tmp / "runs" / "my run")[-1]["exit_code"] == code


def test_a_joined_rank_says_in_which_step_and_phase_it_failed(in_tmp, monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29555")

    def train(_config, world):
        world.on_event(
            1, {"event": "failed", "rank": 1, "step": 4, "phase": "load", "traceback": "Traceback of rank 1"}
        )
        raise OSError("no such file")

    monkeypatch.setattr(join, "join_world", lambda: SimpleNamespace(rank=1, world_size=2))
    monkeypatch.setattr(session, "train", train)
    assert launcher.run_training(load_config(EXAMPLE)) == 10
    assert "rank=1 step=4 phase=load cause=OSError: no such file" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_the_job_is_refused(in_tmp, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29555")
    with pytest.raises(ConfigError, match=r"the plan 'dp=2' has 2 ranks, this job .* has 3") as caught:
        launcher.run_training(load_config(EXAMPLE))
    plan = re.match(r"--plan (\S+),", caught.value.fix)[1]
    assert load_config(EXAMPLE, plan=plan).plan
