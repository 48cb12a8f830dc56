"""Functions that ranks import: training with local steps, and the line that gives a plan this engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from tests.parity import cases, harness
from tests.parity.local_sgd.engine import LocalStepsEngine
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.engine import Engine
from meshwright.comm.communicator import Communicator
from meshwright.ranks.world import World
from meshwright.run import assembly
from meshwright.spec import Plan

LEARNING_RATE = 0.1


@contextlib.contextmanager
def local_steps(every: int) -> Iterator[None]:
    """Have plans of data parallelism take local steps inside, as a line of `run/assembly.py` would have them."""
    others = assembly.data_engine

    def data_engine(module: nn.Module, plan: Plan, world: World, group: Communicator, device: torch.device) -> Engine:
        if plan.dp > 1 and plan.zero == 0:  # the line; in the package it asks a field of the plan
            return LocalStepsEngine(module, group, device, every=every)
        return others(module, plan, world, group, device)

    with mock.patch.object(assembly, "data_engine", data_engine):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What came of a training on one rank, a list with one entry for each step."""

    losses: list[float]
    norms: list[float]
    parameters: list[dict[str, Tensor]]
    sent_bytes: float
    """In all steps [bytes]."""
    expected_bytes: float | None
    """In one step, by the engine's forecast [bytes]."""


def train(name: str, plan: str, every: int, num_samples: int, num_steps: int) -> Training:
    """Train a case with local steps, on every rank."""
    case = cases.find(name)
    losses, norms, parameters = [], [], []
    with local_steps(every):
        model = mw.apply_plan(case.build, plan, loss_fn=case.loss_fn, optimizer=sgd)
    with model:
        forecast = model.engine.forecast()
        before = model.ledger.sent_bytes
        for batch in case.batches(num_samples, num_steps):
            result = model.step(mw.split_batch(batch, model))
            losses.append(result.loss)
            norms.append(result.grad_norm)
            parameters.append({key: p.detach().clone() for key, p in model.named_parameters()})
        sent = model.ledger.sent_bytes - before
    return Training(
        losses=losses, norms=norms, parameters=parameters, sent_bytes=sent, expected_bytes=forecast.sent_bytes()
    )


def save(name: str, plan: str, directory: str) -> None:
    """Save a model that takes local steps, on every rank."""
    case = cases.find(name)
    with local_steps(2):
        model = mw.apply_plan(case.build, plan, loss_fn=case.loss_fn, optimizer=sgd)
    with model:
        mw.save_checkpoint(model, directory, step=0)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def reference(
    name: str, num_ranks: int, every: int, num_samples: int, num_steps: int
) -> list[list[tuple[float, dict[str, Tensor]]]]:
    """Train as many plain models in one process, on the ranks' shares, and average their values.

    Returns:
        For each rank and step, the loss over all shares and the values after the step.
    """
    case = cases.find(name)
    models = []
    for _ in range(num_ranks):
        torch.manual_seed(0)
        models.append(case.build())
    optimizers = [sgd(model.parameters()) for model in models]
    found: list[list[tuple[float, dict[str, Tensor]]]] = [[] for _ in models]
    sizes = harness.split_sizes(num_samples, num_ranks)
    for step, batch in enumerate(case.batches(num_samples, num_steps)):
        total = 0.0
        for model, optimizer, size, share in zip(models, optimizers, sizes, harness.cut(batch, sizes), strict=True):
            optimizer.zero_grad()
            loss = case.loss_fn(model(share[0]), share) if case.loss_fn is not None else model(**share).loss
            loss.backward()
            optimizer.step()
            total += loss.item() * size / num_samples
        if (step + 1) % every == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
        for rows, model in zip(found, models, strict=True):
            rows.append((total, {key: p.detach().clone() for key, p in model.named_parameters()}))
    return found
