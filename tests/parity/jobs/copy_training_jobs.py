"""Scripts that train a copy of the model and write it back (Reptile): on the whole batch, or on each rank's share."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import torch
from tests.parity.jobs import script_gradient_jobs as script
from torch import Tensor, nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _move_towards_copy(module: nn.Module, pair: tuple[Tensor, Tensor], writes: str) -> None:
    """Take two steps of a copy on a task, and move the module half of the way."""
    other = copy.deepcopy(module)
    optimizer = SGD(other.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        script.square(other(pair[0]), pair).backward()
        optimizer.step()
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        if writes == "data":
            mine.data.add_(theirs.data - mine.data, alpha=0.5)
        else:
            with torch.no_grad():
                mine.add_(theirs - mine, alpha=0.5)


def plain(num_steps: int = 0) -> dict[str, Tensor]:
    """Do it on one plain process, after this many steps of the model."""
    torch.manual_seed(0)
    module = script.build()
    for step in range(num_steps):
        script.square(module(script.batch(step)[0]), script.batch(step)).backward()
        optimizer = SGD(module.parameters())
        optimizer.step()
        optimizer.zero_grad()
    for task in range(2):
        _move_towards_copy(module, script.batch(10 + task), "copy")
    return dict(module.state_dict())


def under_plan(plan: str, given: str, writes: str, then: str, directory: str | None = None) -> dict[str, Tensor]:
    """Do it under a plan, and call something that all ranks call; return the state.

    Args:
        plan: The plan.
        given: "share" or "whole": what the copy is trained on.
        writes: "data" or "copy": a write that torch does not count, or one that it does.
        then: "evaluate", "state", "save" or "step", which steps the model before, too.
        directory: Where "save" saves.
    """
    torch.manual_seed(0)
    model = mw.apply_plan(
        script.build, plan, loss_fn=script.square, optimizer=SGD, seed=0, example_batch=script.batch(0)
    )
    share = functools.partial(mw.split_batch, model=model)
    with model:
        if then == "step":
            model.step(share(script.batch(0)))
        for task in range(2):
            pair: Any = script.batch(10 + task)
            # Where a rank has parts, a copy is made inside; else a script needs no call.
            has_parts = model.plan.zero == 3 or model.plan.tp > 1
            with model.whole_parameters() if has_parts else contextlib.nullcontext():
                _move_towards_copy(model.module, share(pair) if given == "share" else pair, writes)
        if then == "evaluate":
            model.evaluate(share(script.batch(1)))
        elif then == "save" and directory is not None:
            mw.save_checkpoint(model, Path(directory), step=1)
        elif then == "step":
            model.step(share(script.batch(1)))
        return model.full_state_dict()
