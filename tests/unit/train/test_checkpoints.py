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

    def save(model, directory, step, extra, retention, *, in_background):
        store = Store(Path(directory))
        draft = store.begin(step)
        model.in_background.append(in_background)
        path = draft.commit(Manifest(step=step, epoch=draft.epoch, plan="single", files=(), tensors={}))
        retention.apply(store, path)
        return path

    monkeypatch.setattr(checkpoints, "save", save)

    def make(*settings):
        model = types.SimpleNamespace(in_background=[], saving=None)
        return RunCheckpoints(load_config("c.toml", [f"checkpoint.{each}" for each in settings]), model, {})

    return make


def due(made, *steps, **why):
    flags = {"is_time": False, "is_end": False, "is_best": False} | why
    return [step for step in steps if made.is_due(step, **flags)]


def saved(made, step, best_step=None, *, is_end=False):
    """Save, and return the last event."""
    return list(made.save(step, best_step=best_step, is_end=is_end))[-1]


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
    saved(made, 4, 4)
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
    saved(made, 3, None)
    assert not made.is_time()
    assert not make().asks_the_clock
    assert not make().is_time()


def test_the_newest_and_the_best_stay(make):
    made = make("keep=2", "best=true")
    for step in range(1, 6):
        event = saved(made, step, min(step, 2))
        assert (event["event"], event["step"], event["is_best"]) == ("saved", step, step <= 2)
    assert names() == ["step-00000002", "step-00000004", "step-00000005"]
    made = make("keep=1")
    saved(made, 6, 2)
    assert names() == ["step-00000006"]
    made = make("keep=0")
    for step in (7, 8, 9):
        saved(made, step, None)
    assert len(names()) == 4


def test_what_is_saved_stays_beside_later_steps_of_another_life(make):
    Path("runs/a/checkpoints/step-00000099").mkdir(parents=True)
    saved(make("keep=1"), 3, None)
    assert names() == ["step-00000003", "step-00000099"]


def test_in_the_background_an_event_comes_when_it_is_over(make, monkeypatch):
    answers: list[bool | StorageError] = []

    def is_saved(model):
        answer = answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    monkeypatch.setattr(checkpoints, "is_saved", is_saved)
    monkeypatch.setattr(checkpoints, "wait_for_checkpoint", is_saved)
    made = make("background=true", "on_error=warn", "best=true", "keep=1")
    assert [*made.look(), *made.finish()] == []
    assert list(made.save(1, best_step=1, is_end=False)) == []
    assert due(made, 1, is_end=True) == []
    answers += [False, True]
    assert list(made.look()) == []
    (event,) = made.look()
    assert (event["event"], event["step"], event["is_best"]) == ("saved", 1, True)
    assert list(made.save(2, best_step=1, is_end=False)) == []
    answers += [True]
    (event,) = made.save(3, best_step=1, is_end=False)
    assert (event["event"], event["step"], event["is_best"]) == ("saved", 2, False)
    answers += [StorageError("no space")]
    failed, event = made.save(4, best_step=1, is_end=True)
    assert (failed["event"], failed["step"], failed["text"]) == ("save_failed", 3, "no space")
    assert (event["event"], event["step"]) == ("saved", 4)
    assert names() == ["step-00000001", "step-00000004"]
    assert made._model.in_background == [True, True, True, False]  # nothing is left to do beside the last one


def test_what_the_next_update_waits_for_is_part_of_the_stall(make, monkeypatch):
    monkeypatch.setattr(checkpoints, "is_saved", lambda _: True)
    made = make("background=true")
    made._model.saving = types.SimpleNamespace(waited_s=0.0)
    list(made.save(1, best_step=None, is_end=False))
    made._model.saving.waited_s = 100.0  # the update comes after the save has begun
    (event,) = made.look()
    assert 100.0 <= event["stall_seconds"] < 160.0


def test_a_best_one_that_was_not_saved_does_not_let_the_one_before_go(make, monkeypatch):
    made = make("best=true", "keep=1", "on_error=warn")
    saved(made, 1, 1)
    right = checkpoints.save

    def fail(*_, **__):
        raise StorageError("no space")

    monkeypatch.setattr(checkpoints, "save", fail)
    assert saved(made, 2, 2)["event"] == "save_failed"
    monkeypatch.setattr(checkpoints, "save", right)
    saved(made, 3, 2)
    assert names() == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("kind", [StorageError, CheckpointError])
def test_a_save_that_fails_stops_the_run_or_is_told(make, monkeypatch, kind):
    def fail(*_, **__):
        raise kind("cannot write x, 5 bytes: No space left on device")

    monkeypatch.setattr(checkpoints, "save", fail)
    with pytest.raises(kind, match="No space left"):
        saved(make(), 3, None)
    made = make("on_error=warn")
    event = saved(made, 3, None)
    assert (event["event"], event["step"]) == ("save_failed", 3)
    assert "5 bytes" in event["text"]
    assert due(made, 3, is_end=True) == [3]


def test_an_old_one_that_cannot_be_deleted_is_told_and_ends_nothing(make, monkeypatch):
    made = make("keep=1")
    saved(made, 1, None)

    def fail(*_, **__):
        raise StorageError("cannot rename x")

    monkeypatch.setattr(checkpoints.Store, "retain", fail)
    assert saved(made, 2, None)["warning"] == "an old checkpoint stays: cannot rename x"


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
