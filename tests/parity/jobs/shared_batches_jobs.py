"""What ranks run in `test_shared_batches`: loops that share out batches, the same on all ranks or not."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)
SAMPLES = 24


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.mse_loss(outputs, batch[1])


def data() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, 0), numbers(SAMPLES, 1))


class OfOneRank(IterableDataset[Any]):
    """A stream that divides itself by rank, as loops around DDP have it."""

    def __iter__(self) -> Iterator[Any]:
        world = mw.current_world()
        yield from list(data())[world.rank :: world.world_size]


def apply(plan: str) -> mw.ParallelModel:
    return mw.apply_plan(nn.Linear(4, 4, dtype=torch.float64), plan, loss_fn=mean, optimizer=SGD)


def train_by_sampler(plan: str) -> float:
    """Train on a DataLoader whose sampler gives each rank its part already."""
    model, world = apply(plan), mw.current_world()
    sampler = DistributedSampler(data(), num_replicas=world.world_size, rank=world.rank, shuffle=False)
    for batch in mw.make_loader(DataLoader(data(), 4, sampler=sampler), model):
        model.step(batch)
    return 0.0


def train_by_stream(plan: str) -> float:
    model = apply(plan)
    for batch in mw.make_loader(OfOneRank(), model, global_batch_size=4):
        model.step(batch)
    return 0.0


def train_on_drawn(plan: str) -> float:
    """Train on noise that each rank draws from torch's generator, which ranks have apart."""
    model = apply(plan)
    x = numbers(6, 0)
    for _ in range(2):
        model.step(mw.split_batch((x + torch.randn_like(x), x), model))
    return 0.0


def train_by_hand(plan: str) -> float:
    """The like in an own loop, whose second batch is another one on each rank."""
    model, world = apply(plan), mw.current_world()
    for step in range(2):
        inputs, targets = mw.split_batch((numbers(6, step * (1 + world.rank)), numbers(6, 9)), model)
        model.backward(F.mse_loss(model(inputs), targets), weight=len(inputs))
        model.optimizer.step()
        model.zero_grad()
    return 0.0


def evaluate_drawn(plan: str) -> float:
    model, world = apply(plan), mw.current_world()
    return model.evaluate(mw.split_batch((numbers(6, world.rank), numbers(6, 9)), model))["loss"]


def train_on_rounded(plan: str) -> float:
    """Train on batches that ranks have computed, whose last bits differ, and on others that some ranks read ahead."""
    model, world = apply(plan), mw.current_world()
    loss = 0.0
    for step in range(3):
        x = numbers(6, step) * (1 + 1e-15 * world.rank)
        if step == 1 and world.rank == 1:
            mw.split_batch((numbers(6, 7), x), model)
        loss = model.step(mw.split_batch((x, numbers(6, 9)), model)).loss
    return loss


def train_rank_local(plan: str) -> float:
    """Train on data of each rank's own, which says so."""
    model, world = apply(plan), mw.current_world()
    own = [(numbers(3, 10 * world.rank + step), numbers(3, 9)) for step in range(2)]
    return [model.step(batch).loss for batch in mw.make_loader(own, model, rank_local=True)][-1]
