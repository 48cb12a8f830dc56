"""Losses of ranks that have no sample of a step; functions that ranks import."""

from __future__ import annotations

import torch
from tests.parity.jobs import loss_jobs

import meshwright as mw


def step_without_a_share(plan: str) -> float:
    """Take a step with a weight that has a graph, in which only one rank has samples."""
    model = mw.apply_plan(
        lambda: torch.nn.Linear(5, 3).double(),
        plan,
        loss_fn=loss_jobs.trained_weight,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with model:
        batch = (torch.ones(1, 5, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))
        return model.step(mw.split_batch(batch, model)).loss
