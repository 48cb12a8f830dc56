"""A model whose forward assigns to its parameters, as constraints of weights do; functions that ranks import."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.jobs.never_wrong_data_jobs import batches, square
from torch import Tensor, nn

import meshwright as mw


class Constrained(nn.Module):
    """A layer that assigns to its parameters in forward: a weight that is kept small, and the vector of a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.vector = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.constrained(self.inp(x).tanh()))

    def constrained(self, x: Tensor) -> Tensor:
        self.mid.weight.data = self.mid.weight.data.clamp(-0.2, 0.2)
        weight = self.mid.weight
        left = weight.detach() @ self.vector.data
        self.vector.data = left / left.norm()
        return x @ (weight / left.norm()).t()


class ConstrainedLayer(nn.Module):
    """The same inside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), Constrained(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Decaying(nn.Module):
    """Shrinks weights in each forward, which no second run may do again; dropout has trials run the cut model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(2))
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.layers[1][0]
        inner.weight.data = inner.weight.data * 0.97
        self.out.weight.data.mul_(0.97)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.out(x)


def build_decaying() -> nn.Module:
    return Decaying().double()


def build_constrained() -> nn.Module:
    return ConstrainedLayer().double()


def trainable_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def reasons_of(plan: str, build: Any = build_constrained) -> list[str]:
    model = mw.apply_plan(build, plan, loss_fn=square, optimizer=trainable_sgd, seed=0)
    with model:
        for batch in batches(2, 8):
            model.step(mw.split_batch(batch, model))
        return list(model.plan.reasons)


class _Late(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.line, self.way, self.calls = nn.Linear(6, 6), way, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 2:
            weight = self.line.weight
            if self.way == "assigned":
                weight.data = weight.data.clamp(-0.2, 0.2)
            else:
                weight.data.clamp_(-0.2, 0.2)
        return self.line(x)


class LateConstraint(nn.Module):
    """A layer that begins to set its weight in the third call, through a variable."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), _Late(way), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build_late(way: str) -> nn.Module:
    return LateConstraint(way).double()


class _Shrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls, self.num_rows = nn.Linear(6, 6), 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_rows = len(x)
        self.calls = self.calls + 1
        self.line.weight.data = self.line.weight.data * 0.9
        return self.line(x) * (2.0 if self.calls > 3 else 1.0)


class Decayed(nn.Module):
    """A layer that makes its weight smaller in each call, and counts its calls, by which it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), _Shrunk(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build_decayed() -> nn.Module:
    return Decayed().double()
