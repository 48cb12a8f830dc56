"""Slow steps: one of two ranks is late, and the time for which the other one stood still shows which."""

import functools
import time

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class SlowOnRankOne(nn.Linear):
    """A layer that takes 20 ms longer on rank 1, as a busy core or a throttled device would."""

    def forward(self, x):
        if mw.current_world().rank == 1:
            time.sleep(0.02)
        return super().forward(x)


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def train():
    model = mw.apply_plan(functools.partial(SlowOnRankOne, 16, 4), "dp=2", loss_fn=loss_fn, optimizer=SGD)
    batch = mw.split_batch((torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4), model)
    model.step(batch)  # the first step is longer: it tries the loss out
    before = model.ledger.wait_s
    seconds = sum(model.step(batch).seconds for _ in range(5))
    return seconds, model.ledger.wait_s - before


def main():
    ranks = mw.launch(train, 2)
    for rank, (seconds, waited) in enumerate(ranks):
        print(f"rank {rank}: {seconds:.3f} s in 5 steps, of which it waited {waited:.3f} s")
    waits = [waited for _, waited in ranks]
    print("the others wait for rank", waits.index(min(waits)))


if __name__ == "__main__":
    main()
