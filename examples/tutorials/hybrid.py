"""Hybrid plans: data and tensor parallelism on one mesh of four ranks."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def make_batch():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (6,), generator=generator)


def train(plan):
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=SGD)
    share = mw.split_batch(make_batch(), model)
    loss = model.step(share).loss
    entries = sum(parameter.numel() for parameter in model.parameters())
    return loss, len(share[0]), entries


def main():
    plan = mw.Plan.parse("dp=2,tp=2")
    loss, samples, entries = train("single")
    print(f"one device: loss {loss:.6f}, {samples} samples, {entries} parameters")
    for rank, (loss, samples, entries) in enumerate(mw.launch(train, plan.num_ranks, plan)):
        place = plan.mesh.coordinate(rank)
        print(f"rank {rank} (dp={place.dp} tp={place.tp}): loss {loss:.6f}, {samples} samples, {entries} parameters")
    for line in ("hybrid", "zero3", "dp=2,pp=2,zero=2,micro_batches=4"):
        print(f"{line!r} on 8 devices is {mw.Plan.parse(line, None if '=' in line else 8)}")


if __name__ == "__main__":
    main()
