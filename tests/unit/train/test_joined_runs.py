"""Runs in a job that another launcher has started: what its ranks report, and which plans fit it."""

import contextlib
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.compare.command import run_comparison
from meshwright.compare.verify_config import run_verification
from meshwright.errors import ConfigError, UserCodeError
from meshwright.measure import verify
from meshwright.ranks import join, unfinished
from meshwright.train import launcher, session
from meshwright.train.config.load import load_config

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt_python.toml"


pytestmark = pytest.mark.usefixtures("in_tmp")


def be_rank(monkeypatch, rank, world_size):
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29555}.items():
        monkeypatch.setenv(name, str(value))


def test_a_joined_rank_says_in_which_step_and_phase_it_failed(monkeypatch, capsys):
    be_rank(monkeypatch, 1, 2)

    def train(_config, world, *, resume):
        world.on_event(
            1, {"event": "failed", "rank": 1, "step": 4, "phase": "load", "traceback": "Traceback of rank 1"}
        )
        raise OSError("no such file")

    world = SimpleNamespace(rank=1, world_size=2, watch=None, sharing_failures=contextlib.nullcontext)
    monkeypatch.setattr(join, "join_world", lambda **_: world)
    monkeypatch.setattr(session, "train", train)
    assert launcher.run_training(load_config(EXAMPLE)) == 10
    assert "rank=1 step=4 phase=load cause=OSError: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_in_a_joined_ranks_code_names_the_rank(monkeypatch, capsys, rank):
    be_rank(monkeypatch, rank, 2)

    def train(_config, _world, *, resume):
        raise KeyboardInterrupt

    world = SimpleNamespace(rank=rank, world_size=2, watch=None, sharing_failures=contextlib.nullcontext)
    monkeypatch.setattr(join, "join_world", lambda **_: world)
    monkeypatch.setattr(session, "train", train)
    assert launcher.run_training(load_config(EXAMPLE)) == 130
    assert f"rank={rank} " in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_joined_rank_that_has_failed_reports_though_the_agent_ends_it(monkeypatch, capsys, rank):
    be_rank(monkeypatch, rank, 2)

    @contextlib.contextmanager
    def sharing_failures():
        try:
            yield
        finally:  # another rank, which was told, has ended meanwhile
            signal.raise_signal(signal.SIGTERM)

    def train(_config, _world, *, resume):
        raise OSError("no such file")

    world = SimpleNamespace(rank=rank, world_size=2, watch=None, sharing_failures=sharing_failures)
    monkeypatch.setattr(join, "join_world", lambda **_: world)
    monkeypatch.setattr(session, "train", train)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    try:
        assert launcher.run_training(load_config(EXAMPLE)) == 10
        assert not heard
        signal.raise_signal(signal.SIGTERM)
        assert heard  # afterwards it does what it did before
    finally:
        signal.signal(signal.SIGTERM, before)
    assert f"rank={rank} step=0 phase=run cause=OSError: no such file" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_the_job_is_refused(monkeypatch):
    be_rank(monkeypatch, 0, 3)
    with pytest.raises(ConfigError, match=r"the plan 'dp=2' has 2 ranks, this job .* has 3") as caught:
        launcher.run_training(load_config(EXAMPLE))
    plan = re.match(r"--plan (\S+),", caught.value.fix)[1]
    assert load_config(EXAMPLE, plan=plan).plan


@pytest.mark.parametrize("code", [0, 3, None])
def test_a_run_whose_code_calls_sys_exit_is_not_done(monkeypatch, code):
    def leave(self, *, resume):
        self.step, self.phase = 4, "load"
        raise SystemExit(code)

    told, waited = [], []
    world = SimpleNamespace(rank=1, world_size=2, emit=told.append, catching_stop_signals=contextlib.nullcontext)
    monkeypatch.setattr(session._Session, "run", leave)
    monkeypatch.setattr(unfinished, "await_all", waited.append)
    with pytest.raises(UserCodeError, match=re.escape(f"rank 1 of 2 called sys.exit({code!r})")) as caught:
        session.train(load_config(EXAMPLE), world)
    # Four steps are done, so that it was to load the batch of the fifth.
    assert (caught.value.rank, caught.value.step, caught.value.phase) == (1, 5, "load")
    assert [(event["event"], event["step"], event["phase"]) for event in told] == [("failed", 5, "load")]
    assert "in leave" in told[0]["traceback"]
    assert waited == [unfinished.LEAVE_S]  # before anything is told: who is told ends the ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_a_job_verify_together_and_the_first_one_reports(monkeypatch, capsys, rank):
    be_rank(monkeypatch, rank, 2)
    shared = []

    @contextlib.contextmanager
    def sharing_failures():
        shared.append("begun")
        yield

    monkeypatch.setattr(join, "join_world", lambda **_: SimpleNamespace(sharing_failures=sharing_failures))
    report = SimpleNamespace(equal=False, to_text=lambda: "NOT equal")
    monkeypatch.setattr(verify, "verify_plan", lambda *_, **__: report)
    assert run_verification(EXAMPLE, "dp=2") == (1 if rank == 0 else 0)
    assert capsys.readouterr().out == ("NOT equal\n" if rank == 0 else "")
    assert shared == ["begun"]


def test_a_job_of_other_ranks_than_the_plan_has_verifies_nothing(monkeypatch):
    be_rank(monkeypatch, 0, 2)
    with pytest.raises(ConfigError, match=r"the plan 'dp=3' has 3 ranks, .* has started 2") as error:
        run_verification(EXAMPLE, "dp=3")
    assert "start 3 ranks" in str(error.value)


def test_ranks_of_a_job_compare_nothing(monkeypatch):
    be_rank(monkeypatch, 0, 2)
    with pytest.raises(ConfigError, match=r"compare starts the ranks of each plan itself, and .* has started 2"):
        run_comparison(EXAMPLE, "single")
