"""Own loops at their edges: what is refused, shares without samples, compiled models, casts, buffers, optimizers of matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.parity.jobs.own_loop_jobs import STEPS, Found, Sgd, batch_of, build_net, seen_by
from torch import Tensor, nn

import meshwright as mw


def _write_own_gradients(model: Any, rank: int) -> None:
    model.optimizer.step()
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    model.optimizer.step()


AFTER_BACKWARD: dict[str, Callable[[Any, int], Any]] = {
    "closure": lambda model, _: model.optimizer.step(lambda: 0.0),
    "clipped by torch": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "zeroed": lambda model, _: model.module.zero_grad(set_to_none=False),
    "written": _write_own_gradients,
}


def refused_way(plan: str, way: str) -> None:
    """Do one thing wrong in an own loop."""
    rank = 0 if (world := mw.current_world()) is None else world.rank
    with mw.apply_plan(build_net, plan, optimizer=Sgd) as model, mw.apply_plan(build_net, plan) as other:
        x, y = (part[: len(part) // 2] for part in batch_of(0))
        read = model.module[0].up.weight.square().sum() if way == "read early" else 0.0
        loss = (model(x) - y).square().mean() + read
        if way == "no weight":
            model.backward(loss)
        elif way == "no graph":
            model.backward(loss.detach(), weight=1)
        elif way == "another model":
            other.backward(loss, weight=1)
        elif way == "other losses":
            (model.backward(loss, weight=1) if rank else other.backward(other(x).sum(), weight=1))
        elif way == "stale":
            model.backward(loss, weight=1, retain_graph=True)
            model.optimizer.step()
            model.backward(loss, weight=1)
        elif way == "nothing counts":
            model.backward(loss, weight=0)
        elif way == "not finite":
            model.backward(loss * float("nan"), weight=1)
            model.optimizer.step()
        elif way == "shared":
            mw.apply_plan(nn.Sequential(model.module[1], nn.Linear(5, 2)), plan)
        else:
            model.backward(loss, weight=1)
            AFTER_BACKWARD.get(way, lambda *_: None)(model, rank)


def empty_share(plan: str) -> Found:
    """Train where one rank has no sample."""
    with mw.apply_plan(build_net, plan, optimizer=Sgd) as model:
        x, y = batch_of(0)
        x, y = (x, y) if model.dp_rank == 0 else (x[:0], y[:0])
        told = [model.backward((model(x) - y).square().mean(), weight=len(x))]
        gradients = seen_by(model)
        model.module.zero_grad()
        x, y = batch_of(1)
        told.append(model.backward((model(x) - y).square().mean(), weight=len(x)))
        return {"told": told, "gradients": gradients, "second": seen_by(model)}


def compiled_call(plan: str) -> tuple[float, float]:
    """Return a loss whose forward a script compiles, and the same without."""
    with mw.apply_plan(build_net, plan, optimizer=Sgd) as model:
        x, y = mw.split_batch(batch_of(0), model)
        model.backward((model(x) - y).square().mean(), weight=len(x))
        found = []
        for call in (torch.compile(lambda x: model(x) * 1.0, backend="eager"), model):
            model.zero_grad()
            found.append(model.backward((call(x) - y).square().mean(), weight=len(x)))
        return found[0], found[1]


def cast_inputs(plan: str) -> list[float]:
    """Return losses of float32 layers under autocast, with inputs that the script has cast itself."""
    with mw.apply_plan(lambda: build_net().float(), plan, optimizer=Sgd) as model:
        losses = []
        for step in range(2):
            x, y = mw.split_batch(batch_of(step), model)
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(x.bfloat16()).float()
            model.zero_grad()
            losses.append(model.backward((outputs - y.float()).square().mean(), weight=len(x)))
            model.optimizer.step()
        return losses


def with_buffers(plan: str) -> tuple[dict[str, Tensor], int, tuple[str, ...]]:
    """Train a model with running statistics, and a scheduler; return its state, its steps and the plan's reasons."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)).double()

    with mw.apply_plan(build, plan, optimizer=Sgd) as model:
        scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, gamma=0.5)
        for step in range(STEPS):
            x, y = mw.split_batch(batch_of(step), model)
            model.zero_grad()
            model.backward((model(x) - y).square().mean(), weight=len(x))
            model.optimizer.step()
            scheduler.step()
        return model.full_state_dict(), model.num_steps, model.plan.reasons


def by_matrices(plan: str) -> list[float]:
    """Return two steps' losses with an optimizer that needs whole matrices."""
    adafactor = functools.partial(torch.optim.Adafactor, lr=0.1)
    losses: list[float] = []
    with mw.apply_plan(build_net, plan, optimizer=adafactor) as model:
        for step in range(2):
            x, y = batch_of(step)
            losses.append(model.backward((model(x) - y).square().mean(), weight=len(x)))
            model.optimizer.step()
            model.zero_grad()
    return losses
