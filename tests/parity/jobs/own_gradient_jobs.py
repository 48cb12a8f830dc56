"""Gradients that a script makes by hand under a plan, where only `model.backward` exchanges them; ranks import these."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.jobs.never_wrong_data_jobs import batches, build_net, square
from torch import nn

import meshwright as mw


def _second_optimizer(model: Any, share: Any) -> None:
    optimizer = torch.optim.Adam(model.module.parameters())
    square(model.module(share[0]), share).backward()
    optimizer.step()


def _by_hand(model: Any, share: Any) -> None:
    square(model(share[0]), share).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def _clipped(model: Any, share: Any) -> None:
    square(model(share[0]), share).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _inner_step(model: Any, share: Any) -> None:
    torch.autograd.grad(square(model(share[0]), share), list(model.parameters()))


def _inner_step_by_func(model: Any, share: Any) -> None:
    own = dict(model.named_parameters())

    def inner(parameters: Any) -> Any:
        return square(torch.func.functional_call(model.module, parameters, (share[0],)), share)

    found = torch.func.grad(inner)(own)
    fast = {name: value - 0.1 * found[name] for name, value in own.items()}
    model.backward(square(torch.func.functional_call(model.module, fast, (share[0],)), share), weight=len(share[0]))


def _switched_on(model: Any, share: Any) -> None:
    frozen = model.module.out.weight.requires_grad_(False)
    model.step(share)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is frozen)
    square(model.module(share[0]), share).backward()


def _penalty(model: Any, share: Any) -> None:
    del share
    sum(parameter.square().sum() for parameter in model.parameters()).backward()


OWN_GRADIENTS = {
    "second_optimizer": _second_optimizer,
    "by_hand": _by_hand,
    "clipped": _clipped,
    "inner_step": _inner_step,
    "inner_step_by_func": _inner_step_by_func,
    "switched_on": _switched_on,
    "penalty": _penalty,
}


def own_gradients(plan: str, way: str) -> None:
    """Make gradients by hand, in one of several ways."""
    with mw.apply_plan(build_net, plan, loss_fn=square) as model:
        share = mw.split_batch(batches(1)[0], model)
        model.step(share)
        OWN_GRADIENTS[way](model, share)
