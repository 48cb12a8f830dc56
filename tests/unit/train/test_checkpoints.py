"""train/checkpoints.py: when a checkpoint is due, what stays, and what is told of a disk that fails."""

import types
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.store import Store
from meshwright.errors import CheckpointError, StorageError
from meshwright.train import checkpoints
from meshwright.train.checkpoints import RunCheckpoints, RunState
from meshwright.train.config.load import load_config

CONFIG = """
model = { target = "user_model:build" }
data = { source = "python-stdlib" }
optimizer = { lr = 0.1 }
train = { steps = 20, global_batch_size = 8, plan = "single", eval_every = 2, name = "a" }
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make the checkpoints of a run on rank 0; each save is one without tensors."""
    (tmp_path / "user_model.py").write_text("def build():\n    return None\n")
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def save(model, directory, *, step, extra):
        draft = Store(Path(directory)).begin(step)
        return draft.commit(Manifest(step=step, epoch=draft.epoch, plan="single", files=(), tensors={}))

    monkeypatch.setattr(checkpoints, "save_checkpoint", save)

    def make(*settings):
        model = types.SimpleNamespace(world=types.SimpleNamespace(rank=0))
        return RunCheckpoints(load_config("c.toml", [f"checkpoint.{each}" for each in settings]), model, {})

    return make


def due(made, *steps, **why):
    flags = {"is_time": False, "is_end": False, "is_best": False} | why
    return [step for step in steps if made.is_due(step, **flags)]


def names():
    return sorted(path.name for path in Path("runs/a/checkpoints").iterdir())


def test_when_one_is_due(make):
    assert due(make(), *range(1, 10)) == []
    assert due(make(), 7, is_end=True) == [7]
    assert due(make("at_end=false"), 7, is_end=True) == []
    assert due(make("every_steps=3"), *range(1, 10)) == [3, 6, 9]
    assert due(make(), 7, is_time=True) == [7]
    assert due(make(), 7, is_best=True) == []
    assert due(make("best=true"), 7, is_best=True) == [7]


def test_one_step_is_saved_once(make):
    made = make("every_steps=2", "best=true")
    made.save(4, best_step=4)
    assert due(made, 4, is_end=True, is_best=True, is_time=True) == []
    assert due(made, 6) == [6]


def test_the_clock_runs_from_the_last_one(make, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    made = make("every_minutes=2")
    assert made.asks_the_clock
    assert not made.is_time()
    now[0] = 219.9
    assert not made.is_time()
    now[0] = 220.0
    assert made.is_time()
    made.save(3, best_step=None)
    assert not made.is_time()
    assert not make().asks_the_clock
    assert not make().is_time()


def test_the_newest_and_the_best_stay(make):
    made = make("keep=2", "best=true")
    for step in range(1, 6):
        event = made.save(step, best_step=min(step, 2))
        assert (event["event"], event["step"], event["is_best"]) == ("saved", step, step <= 2)
    assert names() == ["step-00000002", "step-00000004", "step-00000005"]
    made = make("keep=1")
    made.save(6, best_step=2)
    assert names() == ["step-00000006"]
    made = make("keep=0")
    for step in (7, 8, 9):
        made.save(step, best_step=None)
    assert len(names()) == 4


def test_what_is_saved_stays_beside_later_steps_of_another_life(make):
    Path("runs/a/checkpoints/step-00000099").mkdir(parents=True)
    make("keep=1").save(3, best_step=None)
    assert names() == ["step-00000003", "step-00000099"]


@pytest.mark.parametrize("kind", [StorageError, CheckpointError])
def test_a_save_that_fails_stops_the_run_or_is_told(make, monkeypatch, kind):
    def fail(*_, **__):
        raise kind("cannot write x, 5 bytes: No space left on device")

    monkeypatch.setattr(checkpoints, "save_checkpoint", fail)
    with pytest.raises(kind, match="No space left"):
        make().save(3, best_step=None)
    made = make("on_error=warn")
    event = made.save(3, best_step=None)
    assert (event["event"], event["step"]) == ("save_failed", 3)
    assert "5 bytes" in event["text"]
    assert due(made, 3, is_end=True) == [3]


def test_an_old_one_that_cannot_be_deleted_is_told_and_ends_nothing(make, monkeypatch):
    made = make("keep=1")
    made.save(1, best_step=None)

    def fail(*_, **__):
        raise StorageError("cannot rename x")

    monkeypatch.setattr(checkpoints.Store, "retain", fail)
    assert made.save(2, best_step=None)["warning"] == "an old checkpoint stays: cannot rename x"


def test_the_state_of_a_run_goes_on(make):
    make()
    config = load_config("c.toml")
    state = RunState(config)
    found = [state.note_evaluation(step, loss) for step, loss in enumerate([1.0, 3.0, 2.0, float("nan"), 2.5, 2.0])]
    assert found == [False, True, True, False, False, False]  # before the first step nothing is trained
    after = RunState(config)
    after.load_state_dict(state.state_dict())
    assert after.state_dict() == state.state_dict()
    assert (after.best_loss, after.best_step, after.eval_loss, after.evaluated_at) == (2.0, 2, 2.0, 5)
    assert not after.note_evaluation(6, 2.0)
    assert after.note_evaluation(7, 1.9)
    with pytest.raises(CheckpointError, match="version 2"):
        after.load_state_dict(state.state_dict() | {"version": 2})
