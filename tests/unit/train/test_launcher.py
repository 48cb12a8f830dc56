"""train/launcher.py: what a run leaves, how it is continued, started again and ended; its ranks are made up."""

from pathlib import Path

import pytest

from meshwright.errors import (
    CheckpointError,
    LostPeerError,
    NonFiniteError,
    RankNote,
    StoppedOnRequest,
    StorageError,
    UserCodeError,
    WorkerKilledError,
)
from meshwright.train import launcher
from meshwright.train.config.load import load_config
from meshwright.train.events import read_events

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt_python.toml"


def step_event(number, **changes):
    numbers = {"samples_per_s": 1.0, "tokens_per_s": 1.0, "seconds": 0.1, "step_seconds": 0.1, "eta_s": 1.0, "lr": 0.1}
    counts = {"num_samples": 2, "num_tokens": 2, "peak_memory_bytes": 10, "skipped": False}
    return {"event": "step", "step": number, "steps": 6, "loss": 1.0, "grad_norm": 1.0} | numbers | counts | changes


def fake_launch(*lives, events=(), error=None, stopped=False):
    """Ranks that hand out events and then fail, or end; `lives`: what they do at the first start, at the second, ..."""
    left = list(lives or [(events, error)])

    def launch(fn, num_ranks, config_json, resume, *, threads_per_rank, timeout_s, on_event, on_beats):
        assert timeout_s == 300.0
        fake.resumed.append(resume)
        told, failure = left.pop(0)
        for rank, event in told:
            on_event(rank, event)
        if failure is not None:
            raise failure
        sent = {"dp": 100}
        return [
            {"rank": r, "step": 6, "stopped": stopped, "peak_memory_bytes": 10 + r, "sent_bytes": sent}
            for r in range(num_ranks)
        ]

    fake = launch
    fake.resumed = []
    return launch


@pytest.fixture
def run(in_tmp, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(*lives, settings=(), resume=False, **kwargs):
        fake = fake_launch(*lives, **kwargs)
        monkeypatch.setattr(launcher, "launch", fake)
        code = launcher.run_training(
            load_config(EXAMPLE, ["train.name=my run", "train.plan=distributed", *settings]), resume=resume
        )
        run.resumed = fake.resumed
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


def saved_event(step):
    return {"event": "saved", "step": step, "path": f"checkpoints/step-{step:08}", "seconds": 0.1, "is_best": False}


def test_a_stop_says_where_and_what_was_saved(run):
    code, shown = run(stopped=True)
    assert code == 75
    assert "stopped on request after step 6 of 330; nothing was saved" in shown.err
    code, shown = run(events=[(0, step_event(4))], error=StoppedOnRequest("x"))
    assert code == 75
    assert "after step 4 of 330" in shown.err
    code, shown = run(events=[(0, step_event(6)), (0, saved_event(6))], stopped=True)
    assert "after step 6 of 330; saved in checkpoints/step-00000006\nfix: continue it: --resume" in shown.err
    code, shown = run(events=[(0, saved_event(2)), (0, step_event(6))], stopped=True)
    assert "after step 6 of 330; saved after step 2 in checkpoints/step-00000002" in shown.err


# -- runs that are continued ------------------------------------------------------------------------------------------


def make_checkpoint(in_tmp, step=3):
    path = in_tmp / "runs" / "my run" / "checkpoints" / f"step-{step:08}"
    path.mkdir(parents=True)
    return path


def test_resume_where_nothing_is_begins_anew_and_says_so(run, in_tmp):
    code, shown = run(resume=True)
    assert (code, run.resumed) == (0, [False])
    assert "has nothing to continue: the run begins anew" in shown.err


def test_resume_without_a_checkpoint_of_a_run_that_came_on_is_refused(run, in_tmp):
    run(events=[(0, step_event(1))])
    with pytest.raises(CheckpointError, match="events of a run and no checkpoint") as caught:
        run(resume=True)
    assert (caught.value.exit_code, caught.value.fix) == (14, "start it anew: leave out --resume")


def test_resume_continues_and_without_it_the_old_checkpoints_are_set_aside(run, in_tmp):
    make_checkpoint(in_tmp)
    assert run(resume=True)[0] == 0
    assert run.resumed == [True]
    folder = in_tmp / "runs" / "my run"
    for number in (1, 2):
        _, shown = run()
        assert run.resumed == [False]
        assert f"are in runs/my run/checkpoints.{number} now" in shown.err
        assert [path.name for path in (folder / f"checkpoints.{number}").iterdir()] == ["step-00000003"]
        assert list((folder / "checkpoints").iterdir()) == []
        make_checkpoint(in_tmp)


def test_a_restart_by_torchrun_continues_what_there_is(run, in_tmp, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    make_checkpoint(in_tmp)
    run()
    assert run.resumed == [False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run(events=[(0, step_event(1))])
    assert run.resumed == [False]  # it had no checkpoint yet
    make_checkpoint(in_tmp)
    run()
    assert run.resumed == [True]


def lost():
    return WorkerKilledError("rank 1 of 2 (pid 77) was killed by SIGKILL", rank=1)


@pytest.fixture
def pauses(monkeypatch):
    found = []
    monkeypatch.setattr(launcher, "wait", found.append)
    return found


def test_ranks_that_were_lost_are_started_again(run, in_tmp, pauses):
    def save(events):
        yield from events
        make_checkpoint(in_tmp, 2)

    first = save([(0, step_event(1)), (0, step_event(2))])
    code, shown = run((first, lost()), ([(0, step_event(3))], None), settings=["train.max_restarts=2"])
    assert (code, run.resumed, pauses) == (0, [False, True], [1.0])
    assert "restart 1 of 2 in 1 s, after step 2" in shown.out
    (told,) = [e for e in read_events(in_tmp / "runs" / "my run") if e["event"] == "restarting"]
    assert (told["exit_code"], told["step"], told["number"], told["most"]) == (11, 2, 1, 2)
    assert "killed by SIGKILL" in told["cause"]


def test_the_third_time_at_one_step_ends_it_with_that_error(run, in_tmp, pauses):
    lives = [([(0, step_event(1))], lost()) for _ in range(3)]
    code, shown = run(*lives, settings=["train.max_restarts=9"])
    assert (code, pauses) == (11, [1.0, 2.0])
    assert "no restart: the same cause has stopped it 3 times after step 1" in shown.err
    assert shown.err.splitlines()[-1].startswith("FATAL run=my_run rank=1 step=1")


def test_nothing_is_started_again_unasked_or_for_a_users_mistake(run, pauses):
    assert run(([], lost()))[0] == 11
    assert run(([], ValueError("in the first step")), settings=["train.max_restarts=9"])[0] == 10
    assert pauses == []


def test_a_stop_in_a_pause_is_a_stop(run, monkeypatch):
    monkeypatch.setattr(launcher, "wait", lambda pause_s: True)
    code, shown = run(([(0, step_event(4)), (0, saved_event(4))], lost()), settings=["train.max_restarts=9"])
    assert code == 75
    assert "stopped on request after step 4 of 330; saved in" in shown.err


def test_a_folder_for_checkpoints_that_cannot_be_written_ends_the_run_before_its_first_step(run, in_tmp):
    folder = in_tmp / "runs" / "my run"
    folder.mkdir(parents=True)
    (folder / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match="checkpoints: File exists") as caught:
        run()
    assert caught.value.exit_code == 13
    code, shown = run(settings=["checkpoint.on_error=warn"])
    assert code == 0
    assert "warning: no checkpoint can be written: cannot make runs/my run/checkpoints: File exists" in shown.err
    assert run(settings=["checkpoint.at_end=false"])[0] == 0


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
            LostPeerError("rank 0 has waited 300 s", rank=0, peer=1),  # who waited is not to blame
            12,
            "FATAL run=my_run rank=1 step=3 phase=load cause=LostPeerError: rank 0 has waited 300 s",
        ),
        (
            LostPeerError("connection closed", rank=1),  # which of the others it was, gloo does not say
            12,
            "FATAL run=my_run rank=unknown step=3 phase=load cause=LostPeerError: connection closed",
        ),
        (
            LostPeerError("all_reduce failed"),
            12,
            "FATAL run=my_run rank=unknown step=1 phase=run cause=LostPeerError: all_reduce failed",
        ),
        (NonFiniteError("NaN", rank=1), 15, "FATAL run=my_run rank=1 step=3 phase=load cause=NonFiniteError: NaN"),
        (KeyboardInterrupt(), 130, "FATAL run=my_run rank=unknown step=1 phase=run cause=KeyboardInterrupt"),
    ],
)
def test_a_failure_ends_with_a_line_for_machines(run, in_tmp, error, code, last):
    failed = {"event": "failed", "rank": 1, "step": 3, "phase": "load", "traceback": "Traceback of rank 1"}
    got, shown = run(events=[(0, step_event(1)), (1, failed)], error=error)
    assert got == code
    lines = shown.err.splitlines()
    assert lines[-1] == last
    if "rank=1" in last:  # where this library found NaN concerns nobody
        assert (lines[0] == "Traceback of rank 1") is not isinstance(error, NonFiniteError)
    if isinstance(error, KeyboardInterrupt):
        assert lines == [last]
    assert read_events(in_tmp / "runs" / "my run")[-1]["exit_code"] == code
