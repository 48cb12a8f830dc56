"""A step: it does not put the plan's reasons together, which takes milliseconds for a model of many parameters."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.run.parallel_model import ParallelModel


def test_steps_evaluations_and_backwards_ask_for_no_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(model: ParallelModel) -> None:
        raise AssertionError("the whole plan was put together for a step")

    batch = torch.randn(4, 2), torch.randn(4, 1)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(nn.Linear(2, 1), "single", loss_fn=_mean_square, optimizer=optimizer) as model:
        monkeypatch.setattr(ParallelModel, "plan", property(asked))
        assert model.step(batch).num_samples == 4
        assert model.evaluate(batch)["num_samples"] == 4
        model.backward(_mean_square(model(batch[0]), batch))
        monkeypatch.undo()
        assert model.plan.dp == 1


def _mean_square(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()
