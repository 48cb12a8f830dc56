"""A notebook's cell: ranks run what is defined there and nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.faults.command import ROOT

CELL = """
import functools, json, torch
import meshwright as mw
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def loss_fn(outputs, batch):
    return ((outputs - batch[1]) ** 2).mean()


def work(plan):
    build = lambda: Net().double()
    model = mw.apply_plan(build, plan, loss_fn=loss_fn, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    pair = (torch.randn(8, 8, generator=generator).double(), torch.randn(8, 8, generator=generator).double())
    return [model.step(mw.split_batch(pair, model)).loss for _ in range(3)]


print(json.dumps([work("single"), *mw.launch(work, 2, "dp=2", threads_per_rank=1)]))
"""


@pytest.mark.long
def test_a_cell_launches_its_own_function_and_classes() -> None:
    pytest.importorskip("cloudpickle")
    # A program from the standard input has no file, as a kernel's main program has none.
    done = subprocess.run(
        [sys.executable, "-"], input=CELL, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    alone, *ranks = json.loads(done.stdout.splitlines()[-1])
    for losses in ranks:
        assert losses == pytest.approx(alone, rel=1e-12)
