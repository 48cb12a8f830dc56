"""save_checkpoint by one process: what stays beside checkpoints of before, and which states of schedules come back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import meshwright as mw
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.run.checkpoints import loading, saving
from meshwright.run.parallel_model import ParallelModel


def apply() -> ParallelModel:
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    return mw.apply_plan(lambda: nn.Linear(3, 2), "single", loss_fn=mse, optimizer=optimizer)


def mse(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_save_stays_beside_later_steps_of_another_life(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (100, 200):
        mw.save_checkpoint(apply(), tmp_path, step=step)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        path = mw.save_checkpoint(apply(), tmp_path, step=2, keep=1)
    assert path.is_dir()
    assert names(tmp_path) == ["step-00000002", "step-00000200"]
    assert f"{tmp_path}/step-00000200, saved before, is of a later step than {path}" in caplog.text
    assert mw.load_checkpoint(apply(), tmp_path, step=2) == 2


def test_what_follows_a_damaged_checkpoint_is_not_lost(tmp_path: Path) -> None:
    for step in (10, 20):
        mw.save_checkpoint(apply(), tmp_path, step=step)
    file = tmp_path / "step-00000020" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    model = apply()
    assert mw.load_checkpoint(model, tmp_path) == 10
    mw.save_checkpoint(model, tmp_path, step=11, keep=1)
    assert mw.load_checkpoint(apply(), tmp_path) == 11
    for step in (20, 21):  # and when it is overtaken, it goes like any other
        mw.save_checkpoint(model, tmp_path, step=step, keep=1)
    assert names(tmp_path) == ["step-00000021"]


def test_of_one_step_that_is_saved_again_the_last_stays(tmp_path: Path) -> None:
    for _ in range(3):
        mw.save_checkpoint(apply(), tmp_path, step=5, keep=1)
    assert names(tmp_path) == ["step-00000005.3"]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1])], [3]
    ),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_go_on(tmp_path: Path, name: str) -> None:
    def rates(model: ParallelModel, schedule: Any, count: int) -> list[float]:
        found: list[float] = []
        assert model.optimizer is not None
        for _ in range(count):
            model.optimizer.step()
            schedule.step(*([1.0] if name == "plateau" else []))
            found.append(model.optimizer.param_groups[0]["lr"])
        return found

    def save(count: int) -> list[float]:
        model = apply()
        schedule = SCHEDULES[name](model.optimizer)
        rates(model, schedule, count)
        mw.save_checkpoint(model, tmp_path / str(count), step=count, extra={"schedule": schedule})
        return rates(model, schedule, 6)

    for count in (0, 1, 3):
        expected = save(count)
        model = apply()
        schedule = SCHEDULES[name](model.optimizer)
        assert mw.load_checkpoint(model, tmp_path / str(count), extra={"schedule": schedule}) == count
        assert rates(model, schedule, 6) == expected


class State:
    """What has a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    states = [{"a": [1, 2.5, None, {"b": "x"}]}, {"a": (1, float("inf")), "dict": {"tuple": [1]}}, {}, [], None]
    extra = {str(number): State(state) for number, state in enumerate(states)}
    mw.save_checkpoint(apply(), tmp_path, step=1, extra=extra)
    back = {name: State("none") for name in extra}
    mw.load_checkpoint(apply(), tmp_path, extra=back)
    assert [item.state for item in back.values()] == states
    with Store(tmp_path).newest()[0] as snapshot:
        assert snapshot.manifest.state["extra"]["0"] == states[0]  # plain JSON stays as it is


@pytest.mark.parametrize("value", [{1, 2}, torch.zeros(2), object(), {1: 2}], ids=["set", "tensor", "object", "keys"])
def test_what_has_no_place_in_a_file_is_refused_with_its_name(tmp_path: Path, value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(mw.CheckpointError, match=rf"'extra\['loader'\].state_dict\(\)/x/0' is a {kind}.*\nfix: give"):
        mw.save_checkpoint(apply(), tmp_path, step=1, extra={"loader": State({"x": [value]})})
    assert not tmp_path.exists() or names(tmp_path) == []


def test_a_refused_load_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    mw.save_checkpoint(apply(), tmp_path, step=1)
    model = apply()
    with torch.no_grad():
        model.module.get_parameter("weight").fill_(7.0)
    with pytest.raises(mw.CheckpointError, match=r"has no state for extra \['loader'\]; it has \[\]"):
        mw.load_checkpoint(model, tmp_path, extra={"loader": State({})})
    assert model.full_state_dict()["weight"].eq(7.0).all()


def test_a_checkpoint_that_another_run_deletes_meanwhile_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # What was there when the load began was tried, and nothing newer.
    model = apply()
    for step in (1, 2):
        mw.save_checkpoint(model, tmp_path, step=step)

    def open_late(path: Path) -> OpenCheckpoint:
        if path.name == "step-00000002":
            mw.save_checkpoint(model, tmp_path, step=3, keep=1)
        return OpenCheckpoint(path)

    monkeypatch.setattr(loading, "OpenCheckpoint", open_late)
    with caplog.at_level(logging.WARNING):
        assert mw.load_checkpoint(apply(), tmp_path) == 3
    assert not caplog.records


class Expanded(nn.Linear):
    """A layer with a buffer of one row that counts as several."""

    def __init__(self, row: Any) -> None:
        super().__init__(3, 2)
        self.register_buffer("rows", row)


def test_an_expanded_tensor_comes_back(tmp_path: Path) -> None:
    # It was saved, and could not be loaded: torch copies into no such tensor.
    def apply_with(rows: torch.Tensor) -> ParallelModel:
        return mw.apply_plan(
            Expanded(rows), "single", loss_fn=mse, optimizer=functools.partial(torch.optim.SGD, lr=0.5)
        )

    row = torch.tensor([[1.0, float("nan"), 3.0]])
    mw.save_checkpoint(apply_with(row.expand(4, 3)), tmp_path, step=1)
    model = apply_with(torch.zeros(1, 3).expand(4, 3))
    assert mw.load_checkpoint(model, tmp_path) == 1
    assert model.module.get_buffer("rows").stride() == (0, 1)
    torch.testing.assert_close(model.module.get_buffer("rows"), row.expand(4, 3), rtol=0, atol=0, equal_nan=True)
    mw.save_checkpoint(apply_with(torch.arange(12.0).view(4, 3)), tmp_path, step=2)
    with pytest.raises(mw.CheckpointError, match="'rows' has one value for several entries here"):
        mw.load_checkpoint(model, tmp_path)


class Nested(torch.optim.SGD):
    """Keeps a dict of tensors for a parameter."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"x": {"m": torch.ones(())}, "m": torch.zeros(())}
        return super().step(closure)


def test_one_name_for_two_tensors_is_refused(tmp_path: Path) -> None:
    # One of them was saved, and came back as both.
    module = nn.Module()
    for name in ("w", "w/x"):
        module.register_parameter(name, nn.Parameter(torch.ones(3)))
    forward: Any = lambda x: x + module.get_parameter("w") * module.get_parameter("w/x")  # noqa: E731
    module.forward = forward
    model = mw.apply_plan(module, "single", loss_fn=mse, optimizer=functools.partial(Nested, lr=0.5))
    model.step((torch.ones(2, 3), torch.ones(2, 3)))
    with pytest.raises(mw.CheckpointError, match="two tensors would be saved as 'optimizer/w/x/m'"):
        mw.save_checkpoint(model, tmp_path, step=1)


def test_states_that_differ_between_ranks_are_refused() -> None:
    saving._require_alike([{"a": "1", "b": "2"}, {"a": "1", "b": "2"}])
    with pytest.raises(mw.CheckpointError, match=r"extra \['b', 'c'\] has another state on other ranks"):
        saving._require_alike([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}])
