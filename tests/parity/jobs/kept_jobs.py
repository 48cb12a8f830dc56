"""Functions that ranks import: training of models and losses that keep something, and what is told of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from tests.parity.jobs.kept_kinds import KINDS
from tests.parity.jobs.kept_losses import LOSSES, pairs
from torch import Tensor, nn

import meshwright as mw

NUM_SAMPLES, STEPS = 8, 4


def build(kind: str) -> nn.Module:
    """Return a model in float64."""
    torch.manual_seed(0)
    return KINDS[kind]().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_SAMPLES, 6, generator=made, dtype=torch.float64)
    return x, torch.randn(NUM_SAMPLES, 3, generator=made, dtype=torch.float64)


sgd = functools.partial(torch.optim.SGD, lr=0.3)


def plainly(kind: str, loss: str) -> dict[str, Tensor]:
    """Return the state after a plain loop."""
    module, loss_fn = build(kind), LOSSES[loss]()
    optimizer = sgd(module.parameters())
    for step in range(STEPS):
        _between(module, step)
        found = loss_fn(module(batch(step)[0]), batch(step))
        (found.sum / found.weight if isinstance(found, mw.Loss) else found).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def _trained(kind: str, loss: str, line: str) -> mw.ParallelModel:
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=LOSSES[loss](), optimizer=sgd)
    for step in range(STEPS):
        _between(model.module, step)
        model.step(mw.split_batch(batch(step), model))
    return model


def _between(module: nn.Module, step: int) -> None:
    change = getattr(module, "between", None)
    if change is not None:
        change(step)


def short(line: str) -> tuple[str, ...]:
    """Train on a batch of one sample, and return what is told."""
    model = mw.apply_plan(functools.partial(build, "Counted"), line, loss_fn=pairs, optimizer=sgd)
    model.step(mw.split_batch(tuple(tensor[:1] for tensor in batch(0)), model))
    model.step(mw.split_batch(batch(1), model))
    return model.plan.reasons


def uneven(kind: str, line: str, num_samples: int) -> None:
    """Train on a first batch of this many samples."""
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=pairs, optimizer=sgd)
    model.step(mw.split_batch(tuple(tensor[:num_samples] for tensor in batch(0)), model))


def noted() -> list[str]:
    """Keep a note on a layer on one rank, and return the warnings of the package."""

    def between(model: mw.ParallelModel, _: int) -> None:
        if model.dp_rank == 0:
            layer: Any = model.module.mid
            layer.largest = float(layer.weight.detach().abs().max())

    return _warnings("Base", "dp=2", between)


def warned(kind: str, line: str) -> list[str]:
    """Train with an evaluation after each step, and return the warnings of the package."""
    return _warnings(kind, line, lambda model, step: model.evaluate(mw.split_batch(batch(step), model)))


def _warnings(kind: str, line: str, between: Callable[[mw.ParallelModel, int], Any]) -> list[str]:
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=pairs, optimizer=sgd)
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append
    logging.getLogger("meshwright").addHandler(handler)
    try:
        for step in range(3):
            model.step(mw.split_batch(batch(step), model))
            between(model, step)
    finally:
        logging.getLogger("meshwright").removeHandler(handler)
    return [record.getMessage() for record in heard]


def train(kind: str, loss: str, line: str) -> dict[str, Tensor]:
    """Train under a plan."""
    return _trained(kind, loss, line).full_state_dict()


def told(kind: str, loss: str, line: str) -> tuple[str, ...]:
    """Train under a plan, and return what it tells."""
    return _trained(kind, loss, line).plan.reasons


def fussy(line: str) -> tuple[str, ...]:
    """Apply a plan, run the trials of a first step whose backward raises, and return what is told."""
    model = mw.apply_plan(functools.partial(build, "Fussy"), line, loss_fn=pairs, optimizer=sgd)
    try:
        model.step(mw.split_batch(batch(0), model))
    except RuntimeError:
        return model.plan.reasons
    return ()
