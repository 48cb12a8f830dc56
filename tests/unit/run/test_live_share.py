"""Saves in the background that read training's own memory: whatever writes to it beside them, one moment is saved, or none."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import meshwright as mw
from meshwright.checkpoint import store
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.run.checkpoints import live_share
from meshwright.run.checkpoints.background import BackgroundSave
from meshwright.run.checkpoints.live_share import memory_for

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def tensors_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_share, "LEAST_BYTES", 1)
    monkeypatch.setattr(live_share, "PIECE_BYTES", 64)


class Net(nn.Module):
    """Linear layers with statistics, which each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.fails:
            raise ValueError("a forward's own error")
        return self.last(x)


def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randn(8, 2)


def weight(model: mw.ParallelModel) -> Tensor:
    return model.module.get_parameter("first.weight")


def optimizer_of(model: mw.ParallelModel) -> torch.optim.Optimizer:
    assert model.optimizer is not None
    return model.optimizer


@pytest.fixture
def model() -> Iterator[mw.ParallelModel]:
    """Yield a model whose saves read its memory: nobody wrote beside its first one."""
    optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    with mw.apply_plan(Net, "single", loss_fn=loss_fn, optimizer=optimizer, seed=0) as made:
        made.step(batch())
        memory_for(made.module).mode = "read"
        yield made


class Held:
    """Files of tensors that are not written before `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gone = threading.Event()
        self._write = store.write_new_file
        monkeypatch.setattr(store, "write_new_file", self._late)

    def _late(self, path: Path, *args: Any) -> int:
        if path.suffix == ".safetensors":
            assert self._gone.wait(WAIT_S)
        return self._write(path, *args)

    def go(self) -> None:
        self._gone.set()


def saved(directory: Path) -> dict[str, Tensor]:
    (path,) = directory.iterdir()
    with OpenCheckpoint(path) as found:
        found.check()
        return {name: found.read(name) for name in found.manifest.tensors}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    bits = {
        name: (value.view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8)) for name, value in one.items()
    }
    assert [name for name, pair in bits.items() if not torch.equal(*pair)] == []


def own_step(model: mw.ParallelModel) -> None:
    given = batch()
    loss_fn(model.module(given[0]), given).backward()
    optimizer_of(model).step()


def failing_step(model: mw.ParallelModel) -> None:
    net: Any = model.module
    net.fails = True
    with pytest.raises(ValueError, match="own error"):
        model.step(batch())
    net.fails = False
    model.step(batch())


def write_whole(model: mw.ParallelModel) -> None:
    with model.whole_parameters(), torch.no_grad():
        weight(model).zero_()


def average(model: mw.ParallelModel) -> None:
    averaged = AveragedModel(model.module)
    averaged.update_parameters(model.module)
    model.step(batch())
    averaged.update_parameters(model.module)


def replace_data(model: mw.ParallelModel) -> None:
    weight(model).data = torch.zeros(16, 6)
    model.step(batch())


def set_memory(model: mw.ParallelModel) -> None:
    with torch.no_grad():
        own: Any = weight(model)
        own.set_(torch.zeros(16, 6))


def from_vector(model: mw.ParallelModel) -> None:
    nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in model.parameters())), model.parameters())


def load_state(model: mw.ParallelModel) -> None:
    state = optimizer_of(model).state_dict()
    model.step(batch())
    optimizer_of(model).load_state_dict(state)


def change_rate(model: mw.ParallelModel) -> None:
    optimizer_of(model).param_groups[0]["lr"] = 1e-3


RIGHT: dict[str, Callable[[mw.ParallelModel], object]] = {
    "step": lambda model: model.step(batch()),
    "steps": lambda model: [model.step(batch()) for _ in range(3)],
    "own_step": own_step,
    "failing_step": failing_step,
    "forward": lambda model: model(batch()[0]),
    "evaluate": lambda model: model.evaluate(batch()),
    "whole": write_whole,
    "average": average,
    "replace_data": replace_data,
    "set": set_memory,
    "from_vector": from_vector,
    "load_state": load_state,
    "rate": change_rate,
    "double": lambda model: model.module.double(),
}
"""What has memory of its own, or says so before it writes."""


def write(model: mw.ParallelModel) -> None:
    with torch.no_grad():
        weight(model).mul_(2)


def write_one_entry(model: mw.ParallelModel) -> None:
    weight(model).data.view(-1)[3] += 1


def clip(model: mw.ParallelModel) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def write_state(model: mw.ParallelModel) -> None:
    optimizer_of(model).state[weight(model)]["exp_avg"].zero_()


def write_array(model: mw.ParallelModel) -> None:
    weight(model).detach().numpy()[:] = 0


WRONG: dict[str, tuple[Callable[[mw.ParallelModel], object], str]] = {
    "in_place": (write, "model/first.weight"),
    "one_entry": (write_one_entry, "model/first.weight"),
    "clip": (clip, "model/first.weight"),
    "state": (write_state, "optimizer/first.weight/exp_avg"),
    "array": (write_array, "model/first.weight"),
}
"""What a script writes behind the model's back."""


@pytest.mark.parametrize("kind", RIGHT)
def test_what_happens_beside_a_save_is_not_in_it(
    kind: str, tmp_path: Path, model: mw.ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    mw.save_checkpoint(model, tmp_path / "then", step=1)
    held = Held(monkeypatch)
    mw.save_checkpoint(model, tmp_path / "beside", step=1, in_background=True)
    RIGHT[kind](model)
    held.go()
    mw.wait_for_checkpoint(model)
    assert_same(saved(tmp_path / "beside"), saved(tmp_path / "then"))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", WRONG)
def test_what_a_script_writes_beside_a_save_is_never_in_it(
    kind: str, is_first: bool, tmp_path: Path, model: mw.ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_first:
        memory_for(model.module).mode = "watch"
    mw.save_checkpoint(model, tmp_path / "then", step=1)
    held = Held(monkeypatch)
    mw.save_checkpoint(model, tmp_path / "beside", step=1, in_background=True)
    do, name = WRONG[kind]
    do(model)
    model.step(batch())
    held.go()
    if is_first:  # it was copied, as each is from now on
        mw.wait_for_checkpoint(model)
        assert_same(saved(tmp_path / "beside"), saved(tmp_path / "then"))
    else:
        with pytest.raises(
            mw.CheckpointError, match=f"step 1 is not saved: a script has written into .*{name}"
        ) as caught:
            mw.wait_for_checkpoint(model)
        assert "wait_for_checkpoint" in str(caught.value.fix)
        assert list((tmp_path / "beside").iterdir()) == []
    assert memory_for(model.module).mode == "copy"
    mw.save_checkpoint(model, tmp_path / "next", step=2)
    mw.save_checkpoint(model, tmp_path / "next_beside", step=2, in_background=True)
    do(model)
    mw.wait_for_checkpoint(model)
    assert_same(saved(tmp_path / "next_beside"), saved(tmp_path / "next"))


def test_the_fix_helps(tmp_path: Path, model: mw.ParallelModel) -> None:
    mw.save_checkpoint(model, tmp_path, step=1, in_background=True)
    mw.wait_for_checkpoint(model)
    write(model)
    model.step(batch())
    assert memory_for(model.module).mode == "read"


def test_a_load_beside_a_save_is_not_in_it(
    tmp_path: Path, model: mw.ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    mw.save_checkpoint(model, tmp_path / "old", step=1)
    model.step(batch())
    mw.save_checkpoint(model, tmp_path / "then", step=2)
    held = Held(monkeypatch)
    mw.save_checkpoint(model, tmp_path / "beside", step=2, in_background=True)
    assert mw.load_checkpoint(model, tmp_path / "old") == 1
    held.go()
    mw.wait_for_checkpoint(model)
    assert_same(saved(tmp_path / "beside"), saved(tmp_path / "then"))


@pytest.mark.parametrize("named", ["directory", "checkpoint", "step"])
def test_a_save_under_way_is_what_is_loaded(
    named: str, tmp_path: Path, model: mw.ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which one was the newest depended on the disk.
    mw.save_checkpoint(model, tmp_path, step=1)
    model.step(batch())
    expected = weight(model).detach().clone()
    held, wait = Held(monkeypatch), BackgroundSave.wait_for_file

    def wait_for_file(saving: BackgroundSave) -> None:
        held.go()
        wait(saving)

    monkeypatch.setattr(BackgroundSave, "wait_for_file", wait_for_file)
    path = mw.save_checkpoint(model, tmp_path, step=2, in_background=True)
    model.step(batch())
    where = path if named == "checkpoint" else tmp_path
    assert mw.load_checkpoint(model, where, step=2 if named == "step" else None) == 2
    assert torch.equal(weight(model), expected)


@pytest.mark.parametrize("end", ["save", "close"])
def test_a_save_ends_before_what_ends_it(end: str, tmp_path: Path, model: mw.ParallelModel) -> None:
    mw.save_checkpoint(model, tmp_path / "then", step=1)
    mw.save_checkpoint(model, tmp_path / "beside", step=1, in_background=True)
    if end == "save":
        mw.save_checkpoint(model, tmp_path / "next", step=2, in_background=True)
        mw.wait_for_checkpoint(model)
    else:
        model.close()
    assert_same(saved(tmp_path / "beside"), saved(tmp_path / "then"))


def test_a_first_save_beside_which_nobody_writes_lets_the_next_one_read_in_place(
    tmp_path: Path, model: mw.ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_for(model.module)
    memory.mode = "watch"
    held = Held(monkeypatch)
    mw.save_checkpoint(model, tmp_path, step=1, in_background=True)
    model.step(batch())
    assert memory.mode == "read"
    held.go()
    mw.wait_for_checkpoint(model)


def test_a_model_without_an_optimizer_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mw.apply_plan(Net, "single", loss_fn=loss_fn, optimizer=None, seed=0) as model:
        memory_for(model.module).mode = "read"
        mw.save_checkpoint(model, tmp_path / "then", step=1)
        held = Held(monkeypatch)
        mw.save_checkpoint(model, tmp_path / "beside", step=1, in_background=True)
        write(model)  # the script's own update, of which we know nothing
        held.go()
        mw.wait_for_checkpoint(model)
        assert_same(saved(tmp_path / "beside"), saved(tmp_path / "then"))


def test_the_thread_that_commits_does_not_look_at_the_model(
    tmp_path: Path, model: mw.ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The plan's text came from the module's parameters, and under ZeRO-3 a look at those inside a step gathers them: rank 0
    # alone did, beside the others' exchanges (DisagreementError under dp=2,tp=2,zero=3).
    threads: list[str] = []
    detail = model.engine.detail

    def noted(plan: mw.Plan) -> mw.Plan:
        threads.append(threading.current_thread().name)
        return detail(plan)

    monkeypatch.setattr(model.engine, "detail", noted)
    mw.save_checkpoint(model, tmp_path, step=1, in_background=True)
    mw.wait_for_checkpoint(model)
    assert set(threads) == {threading.current_thread().name}
