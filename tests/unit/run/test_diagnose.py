"""Origin of numbers that are not finite: data that are not finite themselves are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw

NAN = float("nan")


def _with(value: float, place: tuple[int, ...]) -> torch.Tensor:
    made = torch.ones(4, 3)
    made[place] = value
    return made


def _loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    targets = batch["targets"] if isinstance(batch, dict) else batch[1]
    return (outputs - targets[:, :1]).square().mean()


@pytest.mark.parametrize(
    ("batch", "place"),
    [
        ((_with(NAN, (2, 1)), torch.ones(4, 3)), "batch[0], sample 0"),  # the second micro-batch has samples 2 and 3
        ((torch.ones(4, 3), _with(float("inf"), (1, 0))), "batch[1], sample 1"),
    ],
)
def test_data_that_are_not_finite_are_named(batch: Any, place: str) -> None:
    plan = "single,micro_batches=2"
    model = mw.apply_plan(lambda: nn.Linear(3, 1), plan, loss_fn=_loss, optimizer=_sgd)
    with model, pytest.raises(mw.NonFiniteError, match="not finite") as error:
        model.step(batch)
    assert f"the data are not finite themselves: {place} of that micro-batch" in error.value.message
    assert (error.value.fix or "").startswith("leave such samples out of the data")


def test_finite_data_are_not_accused() -> None:
    model = mw.apply_plan(lambda: nn.Linear(3, 1), "single", loss_fn=_overflows, optimizer=_sgd)
    with model, pytest.raises(mw.NonFiniteError) as error:
        model.step((torch.ones(4, 3), torch.ones(4, 3)))
    assert "the data are not finite" not in error.value.message


def _overflows(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return _loss(outputs, batch) * 1e38 * 1e38


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
