"""Pipeline parallelism: two ranks with half of the layers each, and micro-batches that keep both busy."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def build_model():
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(16, 5)).double()


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def make_batch():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(10, 16, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(5, (10,), generator=generator)


def train(plan):
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=SGD)
    losses = [model.step(mw.split_batch(make_batch(), model)).loss for _ in range(3)]
    mine = sorted({name.partition(".")[0] for name, _ in model.named_parameters()})
    return losses, mine, dict(model.plan.stages)


def main():
    alone, *_ = train("single")
    ranks = mw.launch(train, 2, "pp=2,micro_batches=4")
    print("one device:", *(f"{loss:.6f}" for loss in alone))
    for rank, (losses, _, _) in enumerate(ranks):
        print(f"rank {rank}:    ", *(f"{loss:.6f}" for loss in losses))
    print("stages:", *(f"{name}:{stage}" for name, stage in ranks[0][2].items()))
    for kind in ("gpipe", "1f1b", "zb-h1"):
        schedule = mw.PipelineSchedule.build(kind, num_ranks=2, num_micro_batches=4)
        print(f"\n{kind}: idle {schedule.simulate().bubble_fraction:.0%}")
        print(schedule.draw())


if __name__ == "__main__":
    main()
