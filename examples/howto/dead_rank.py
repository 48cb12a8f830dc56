"""A rank that dies: the error names it, and nothing is left behind."""

import functools
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def train(kind):
    model = mw.apply_plan(functools.partial(nn.Linear, 4, 2), "dp=2", loss_fn=loss_fn, optimizer=SGD)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    batch = mw.split_batch((inputs, torch.arange(8) % 2), model)
    for step in range(5):
        if step == 3 and mw.current_world().rank == 1:
            if kind == "killed":  # what the kernel does to a process when memory runs out
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such file: samples-0003.bin")
        model.step(batch)


def main():
    try:
        mw.launch(train, 2, "killed")
    except mw.WorkerKilledError as error:
        print(f"WorkerKilledError: rank {error.rank} by {error.signal_name}")
    try:
        mw.launch(train, 2, "raised")
    except ValueError as error:  # a rank's own exception, as it was
        print(f"ValueError: {error}")
        print(error.__notes__[0].splitlines()[0])


if __name__ == "__main__":
    main()
