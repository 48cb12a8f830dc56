"""What a script passes by mistake: refused with what it is and what to pass, before anything is built."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

_SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def _apply(**options: Any) -> mw.ParallelModel:
    given: dict[str, Any] = {"build_model": _build, "plan": "single", "loss_fn": _loss, "optimizer": _SGD, **options}
    return mw.apply_plan(given.pop("build_model"), given.pop("plan"), **given)


def _build() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("build_model", None, "build_model is None"),
        ("build_model", [nn.Linear(2, 2)], "build_model is a list"),
        ("plan", None, "plan is None"),
        ("plan", {"dp": 1}, "plan is a dict"),
        ("plan", b"single", "plan is a bytes"),
        ("loss_fn", "mse", "loss_fn is a str"),
        ("loss_fn", nn.CrossEntropyLoss(), "torch.nn.CrossEntropyLoss, which takes outputs and targets"),
        ("split", 3, "split is a int"),
        ("max_grad_norm", "1", "max_grad_norm must be above 0, it is '1'"),
        ("devices", ["x"], "devices= has 'x', which torch takes for no device"),
        ("devices", "cpu", "devices='cpu' (rule: a list of devices)"),
        ("devices", 3, "devices=3 (rule: a list of devices)"),
        ("pretrained", 3, "pretrained=3 (rule: a text or a path)"),
        ("pretrained", "a\0b", "rule: a text or a path"),
        ("seed", None, "seed must be a whole number"),
        ("seed", 1.5, "seed must be a whole number"),
        ("seed", 2**64, "seed must be a whole number"),
    ],
)
def test_an_argument_of_another_kind_is_refused(name: str, value: Any, word: str) -> None:
    with pytest.raises(mw.ConfigError) as refused:
        _apply(**{name: value})
    assert word in refused.value.message
    assert refused.value.fix


def test_the_fix_for_a_loss_of_torch_works() -> None:
    loss = torch.nn.CrossEntropyLoss()
    batch = (torch.ones(2, 4), torch.tensor([0, 2]))
    with _apply(loss_fn=lambda outputs, batch: loss(outputs, batch[1])) as model:
        assert model.step(batch).loss > 0


def test_a_loss_of_ones_own_class_is_taken() -> None:
    class OfBatch(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, batch: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(outputs, batch[1])

    with _apply(loss_fn=OfBatch()) as model:
        assert model.step((torch.ones(2, 4), torch.tensor([0, 2]))).loss > 0


@pytest.mark.parametrize(
    "given",
    [{"step": 1.5}, {"step": "1"}, {"step": True}, {"step": -1}, {"step": 1, "keep": 1.5}, {"step": 1, "keep": 0}],
)
def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with _apply() as model, pytest.raises(mw.ConfigError, match="rule: step is a whole number"):
        mw.save_checkpoint(model, tmp_path, **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("directory", [None, 3, b"checkpoints", ["checkpoints"], "check\0points"])
def test_a_directory_of_another_kind_is_refused(directory: Any) -> None:
    with _apply() as model:
        with pytest.raises(mw.ConfigError, match="save_checkpoint: the directory is") as saving:
            mw.save_checkpoint(model, directory, step=0)
        with pytest.raises(mw.ConfigError, match="load_checkpoint: the directory is") as loading:
            mw.load_checkpoint(model, directory)
    assert saving.value.fix
    assert loading.value.fix


@pytest.mark.parametrize("step", ["1", 1.0, True])
def test_a_step_to_load_that_is_no_whole_number_is_refused(tmp_path: Path, step: Any) -> None:
    with _apply() as model:
        mw.save_checkpoint(model, tmp_path, step=1)
        with pytest.raises(mw.ConfigError, match="rule: a whole number, or None for the newest"):
            mw.load_checkpoint(model, tmp_path, step=step)
        assert mw.load_checkpoint(model, str(tmp_path), step=1) == 1


@pytest.mark.parametrize("given", [None, 3, [torch.ones(2)], {"x": torch.ones(2)}])
def test_what_is_no_tensor_is_not_gathered(given: Any) -> None:
    with _apply() as model, pytest.raises(mw.ConfigError, match="gather_batch was given a") as refused:
        mw.gather_batch(given, model)
    assert refused.value.fix


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_under_a_plan_is_not_copied(how: Any) -> None:
    with _apply() as model:
        with pytest.raises(mw.ApplyError, match="one rank's part of a model") as refused:
            how(model)
        assert "full_state_dict" in str(refused.value.fix)
        assert copy.deepcopy(_build()).load_state_dict(model.full_state_dict())  # what the fix says
