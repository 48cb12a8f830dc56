"""Averages of a model that were made before a pipeline cut it."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import torch
from tests.parity.jobs.textbook_loop import steps_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import meshwright as mw

BATCHES = [(torch.full((4, 3), 0.1 * step, dtype=torch.float64), torch.ones(4, 2).double()) for step in (1, 2, 3)]


class Uneven(nn.Module):
    """Layers of unlike sizes: two stages have no tensor of one shape in one place."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 5, 5, 7, 2]
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def square(output: Any, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def build() -> Uneven:
    torch.manual_seed(0)
    return Uneven().double()


def apply_uneven() -> Any:
    return mw.apply_plan(build, "pp=2,micro_batches=2", loss_fn=square, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def average_of_a_part(through: str) -> str:
    """Update an early average, or a copy of it, with what a rank holds; return why that is refused."""
    with apply_uneven() as model:
        average = AveragedModel(model.module)
        model.step(BATCHES[0])
        if through == "copied":
            average = copy.deepcopy(average)
        try:
            average.update_parameters(model.module)
        except mw.ApplyError as error:
            model.step(BATCHES[1])  # the ranks are where they were: all of them were refused
            return str(error)
    return "taken"


def average_of_the_whole() -> tuple[dict[str, Tensor], str]:
    """Average inside `whole_parameters`; return the values and the class that a pickled average has."""
    with apply_uneven() as model:
        average = AveragedModel(model.module)
        for batch in BATCHES:
            model.step(batch)
            with model.whole_parameters():
                average.update_parameters(model.module)
        again = pickle.loads(pickle.dumps(average))
        return {name: p.detach().clone() for name, p in average.module.named_parameters()}, str(type(again))


def average_of_another_model() -> list[dict[str, Tensor]]:
    """Give an early average the values of whole models beside the cut one, during training and after it."""
    found, whole = [], build()
    with apply_uneven() as model:
        average = AveragedModel(model.module)
        for batch in BATCHES[:2]:
            model.step(batch)
            whole.load_state_dict(model.full_state_dict())
            average.update_parameters(whole)
        found.append({name: p.detach().clone() for name, p in average.module.named_parameters()})
        model.step(BATCHES[2])
        whole.load_state_dict(model.full_state_dict())
    average.update_parameters(whole)
    return [*found, {name: p.detach().clone() for name, p in average.module.named_parameters()}]


def average_on_one_device(num_steps: int = 3) -> dict[str, Tensor]:
    module = build()
    average = AveragedModel(module)
    for _ in steps_of(module, BATCHES[:num_steps], square):
        average.update_parameters(module)
    return {name: p.detach().clone() for name, p in average.module.named_parameters()}


class Averaging(Uneven):
    """Keeps a moving average of what the first layer gives: a buffer that one stage computes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x).tanh()
            if index == 0 and self.training:
                self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x


def copies_of_a_computed_buffer() -> tuple[Tensor, Tensor, Tensor]:
    """Copy and pickle a model between steps; return its buffer, and what both have of it."""
    torch.manual_seed(0)
    module = Averaging().double()
    with mw.apply_plan(module, "pp=2", loss_fn=square, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as model:
        for batch in BATCHES:
            model.step(batch)
        with model.whole_parameters():
            copied = copy.deepcopy(model.module)
            again = pickle.loads(pickle.dumps(model.module))
        model.step(BATCHES[0])
        with model.whole_parameters():
            return model.module.mean.clone(), copied.mean.clone(), again.mean.clone()


def computed_buffer_on_one_device() -> list[Tensor]:
    torch.manual_seed(0)
    module, found = Averaging().double(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in (*BATCHES, BATCHES[0]):
        optimizer.zero_grad()
        square(module(batch[0]), batch).backward()
        optimizer.step()
        found.append(module.mean.clone())
    return found
