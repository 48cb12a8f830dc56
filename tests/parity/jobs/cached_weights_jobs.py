"""Parametrized weights that a forward keeps by torch.nn.utils.parametrize.cached, under plans and in a plain loop."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import meshwright as mw

WIDTH = 8


class Block(nn.Module):
    """Two layers whose weights have a length of their own in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weight_norm(nn.Linear(WIDTH, 16)), weight_norm(nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Cached(nn.Module):
    """Runs its block twice on weights that are made once; with a penalty it reads one beside the block."""

    def __init__(self, *, has_penalty: bool) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)
        self.has_penalty = has_penalty

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            outputs = self.head(self.block(self.block(x)))
            return outputs + self.block.up.weight.square().mean() if self.has_penalty else outputs


def build(*, has_penalty: bool) -> nn.Module:
    """Return the model."""
    return Cached(has_penalty=has_penalty).double()


def batch(length: int) -> tuple[Tensor, Tensor]:
    """Return four samples."""
    drawn = torch.Generator().manual_seed(length)
    inputs = torch.randn(4, length, WIDTH, generator=drawn, dtype=torch.float64)
    return inputs, inputs.flip(2)


def loss_fn(outputs: Tensor, given: Any) -> Tensor:
    """Return a mean over the samples."""
    return (outputs - given[1]).square().mean()


def plain() -> list[float]:
    """Return the losses of a plain loop."""
    torch.manual_seed(0)
    module = build(has_penalty=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for length in (5, 3, 5):
        optimizer.zero_grad()
        given = batch(length)
        loss = loss_fn(module(given[0]), given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class WeightDrop(nn.Module):
    """Sets a recurrent weight by dropout of another one in each forward: in eval mode that is the other parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        raw = self.lstm.weight_hh_l0
        del self.lstm.weight_hh_l0
        self.lstm.register_parameter("raw", nn.Parameter(raw.data))

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.weight_hh_l0 = nn.functional.dropout(self.lstm.raw, 0.3, self.training)
        return self.lstm(x)[0]


def build_dropping() -> nn.Module:
    """Return a model whose recurrences drop weights."""
    return nn.Sequential(WeightDrop(), nn.Linear(WIDTH, WIDTH), WeightDrop()).double()


def dropping(line: str, *, is_patched: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the state of a model whose recurrences drop weights."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(
        build_patched if is_patched else build_dropping, line, loss_fn=loss_fn, optimizer=optimizer, seed=0
    ) as model:
        losses = [model.step(mw.split_batch(batch(length), model)).loss for length in (5, 3, 5)]
        return losses, model.full_state_dict()


def planned(line: str, *, has_penalty: bool = False) -> list[float]:
    """Return the losses under a plan."""
    make = functools.partial(build, has_penalty=has_penalty)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(make, line, loss_fn=loss_fn, optimizer=optimizer, seed=0) as model:
        return [model.step(mw.split_batch(batch(length), model)).loss for length in (5, 3, 5)]


def build_patched() -> nn.Module:
    """Return a model whose recurrence has a forward that is set on the object, as libraries that drop weights do."""
    lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    raw = lstm.weight_hh_l0
    del lstm.weight_hh_l0
    lstm.register_parameter("raw", nn.Parameter(raw.data))
    original = lstm.forward

    def forward(*args: Any) -> Any:
        lstm.weight_hh_l0 = nn.functional.dropout(lstm.raw, 0.3, lstm.training)
        return original(*args)

    lstm.forward = forward
    return _First(lstm).double()


class _First(nn.Module):
    def __init__(self, lstm: nn.Module) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(WIDTH, WIDTH), lstm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(x))[0])
