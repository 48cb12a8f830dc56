"""Steps of a pipeline in which one layer raises; functions that ranks import."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.jobs import never_wrong_pipeline_jobs as jobs
from tests.parity.jobs.never_wrong_pipeline_states import plain_batch
from torch import Tensor, nn

import meshwright as mw


class _Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.where == "forward":
            raise ValueError("boom")
        if self.where == "backward" and y.requires_grad:
            y.register_hook(self.fail)
        return x + y

    def fail(self, _: Tensor) -> None:
        raise ValueError("boom")


class _Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[_Raises() for _ in range(4)])


def run_with_a_failure(plan: str, place: int, where: str, action: str) -> list[Any]:
    """Return what a step gave, what the next action raised in which a layer fails, and what the step after it gave."""
    with jobs.apply_script(_Model, plan=plan) as model:
        found: list[Any] = [model.step(plain_batch(0)).loss]
        model.module[place].where = where
        try:
            found.append(getattr(model, action)(plain_batch(1)) if action != "forward" else model(plain_batch(1)[0]))
        except (ValueError, mw.UserCodeError) as error:
            found.append(str(error))
        model.module[place].where = ""
        return [*found, model.step(plain_batch(2)).loss]
