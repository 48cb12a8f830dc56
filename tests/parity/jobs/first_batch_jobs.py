"""Models that set parameters in a forward: by their first batch, as ActNorm does, or by the parameters alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.textbook_loop import losses_of
from torch import Tensor, nn

import meshwright as mw

VOCABULARY = 12


class ActNorm(nn.Module):
    """A shift and a scale that are set by the first batch; whether they are is kept in Python or in a buffer."""

    done: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        if kind == "buffer":
            self.register_buffer("done", torch.tensor(False))
        else:
            self.done = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not bool(self.done):
            with torch.no_grad():
                rows = x.flatten(0, -2)
                self.bias.data.copy_(-rows.mean(0))
                self.scale.data.copy_(1 / (rows.std(0) + 1e-6))
            if isinstance(self.done, Tensor):
                self.done.fill_(True)
            else:
                self.done = True
        return (x + self.bias) * self.scale


class Unit(nn.Module):
    """A scale whose length is made one in each forward."""

    def __init__(self, _: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.copy_(F.normalize(self.scale.data, dim=0))
        return x * self.scale


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        norm = Unit if kind == "unit" else ActNorm
        self.norms = nn.ModuleList([norm(kind) for _ in range(2)])
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def trained(plan: str, kind: str) -> list[float]:
    """Take three steps, and return the losses."""
    torch.manual_seed(0)
    model = mw.apply_plan(
        Net(kind).double(), plan, loss_fn=mean, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    return [model.step(mw.split_batch(batch(step), model)).loss for step in range(3)]


def mean(outputs: Tensor, pair: Any) -> Tensor:
    """Return the loss."""
    return F.cross_entropy(outputs.flatten(0, 1), pair[1].flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return ids and labels."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, VOCABULARY, (4, 6), generator=generator) for _ in range(2))
    return ids, labels


def plainly(kind: str) -> list[float]:
    """Train as one plain process."""
    torch.manual_seed(0)
    return losses_of(Net(kind).double(), map(batch, range(3)), mean)
