"""Steps under torch.autocast, for ranks."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.raising_jobs import Model, batch_of
from torch import Tensor, nn

import meshwright as mw
from meshwright.ranks.join import join_world

NUM_STEPS = 3


def _loss_of(outputs: Tensor, batch: Any) -> Tensor:
    assert outputs.dtype == torch.bfloat16
    return F.cross_entropy(outputs, batch[1])


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def plain() -> tuple[list[float], Tensor]:
    """Return losses and a weight of a plain loop: forward and loss under autocast, backward not."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(NUM_STEPS):
        batch = batch_of(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = _loss_of(model(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.blocks[0].get_submodule("up").get_parameter("weight").detach()


def planned(line: str) -> tuple[list[float], Tensor]:
    """Return the same of steps that are taken under autocast; a step after them is not."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(_model, line, loss_fn=_loss_of, optimizer=optimizer) as model:
        losses = []
        for step in range(NUM_STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(model.step(mw.split_batch(batch_of(step), model)).loss)
                assert torch.is_autocast_enabled("cpu")
        weight = model.full_state_dict()["blocks.0.up.weight"]
    return losses, weight


def on_one_rank(line: str, *, inside: bool) -> None:
    """Train under autocast on rank 1 alone: around its steps, or inside of its forwards."""
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    if join_world().rank != 1:
        context = contextlib.nullcontext

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def forward(self, tokens: Tensor) -> Tensor:
            with context() if inside else contextlib.nullcontext():
                return self.model(tokens)

    with mw.apply_plan(
        Cast,
        line,
        loss_fn=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ) as model:
        for step in range(2):
            with contextlib.nullcontext() if inside or not step else context():
                model.step(mw.split_batch(batch_of(step), model))


def two_precisions() -> None:
    """Take a step under another autocast than the plan's."""
    with (
        mw.apply_plan(_model, "single,precision=bf16", loss_fn=_loss_of) as model,
        torch.autocast("cpu", dtype=torch.float16),
    ):
        model.step(batch_of(0))


def asking(line: str) -> float:
    """Run a forward that asks for the dtype of what it is given, in a loop of its own; return the loss."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.bfloat16, "another dtype"
            return self.layer(x)

    with mw.apply_plan(Asking, line, optimizer=functools.partial(torch.optim.SGD, lr=0.1)) as model:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(torch.ones(2, 4, dtype=torch.bfloat16))
        return model.backward(outputs.float().square().mean(), weight=2)
