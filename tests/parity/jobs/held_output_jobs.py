"""What ranks run in `test_held_outputs`: models that return a number of a parameter, or a parameter itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Pair(nn.Module):
    """Features of two towers, and the temperature of their comparison, as CLIP returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 3))
        self.right = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x), self.right(x), self.scale.exp()


def build() -> nn.Module:
    torch.manual_seed(3)
    return Pair().double()


def loss_fn(outputs: Any, batch: Any) -> Tensor:
    left, right, _ = outputs
    return ((left * right).sum(1) - batch[1]).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(6, 4, dtype=torch.float64, generator=generator),
        torch.randn(6, dtype=torch.float64, generator=generator),
    )


def outputs_and_losses(plan: str) -> tuple[list[Tensor], list[float]]:
    """Return what the model gives in evaluation mode before and after two steps, and the losses of these."""
    with mw.apply_plan(build, plan, loss_fn=loss_fn, optimizer=SGD, seed=1) as model:
        losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(2)]
        model.eval()
        with torch.no_grad():
            return [tensor.clone() for tensor in model(batch(2)[0])], losses


class Tempered(Pair):
    """The same, but for a temperature that is returned as it is."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.left(x)), F.normalize(self.right(x)), self.scale


def tempered(rate: float = 0.25) -> nn.Module:
    torch.manual_seed(3)
    model = Tempered().double()
    model.left[2].p = rate
    return model


def of_each_sample(outputs: Any, batch: Any) -> Tensor:
    left, right, scale = outputs
    return ((left * right).sum(1) * scale - batch[1]).square().mean()


class Weighed(Pair):
    """The same, but for weights of the outputs that are returned as they are: as many as a share of two ranks has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x), self.right(x), self.scale


def weighed() -> nn.Module:
    torch.manual_seed(3)
    return Weighed().double()


def of_weighed_outputs(outputs: Any, batch: Any) -> Tensor:
    left, right, scale = outputs
    return ((left * right).sum(1) * scale.mean() - batch[1]).square().mean() + scale.square().mean()


def weighed_losses(plan: str) -> list[float]:
    """Return the losses of four steps."""
    with mw.apply_plan(weighed, plan, loss_fn=of_weighed_outputs, optimizer=SGD, seed=1) as model:
        return [model.step(mw.split_batch(batch(step), model)).loss for step in range(4)]


def of_all_samples(outputs: Any, batch: Any) -> Tensor:
    left, right, scale = outputs
    return F.cross_entropy(left @ right.T * scale, torch.arange(len(left)))


def own_losses(plan: str) -> list[float]:
    """Return the losses of an own loop of two steps, and the temperature that the model gives then, with and without a graph."""
    with mw.apply_plan(tempered, plan, optimizer=SGD, seed=1) as model:
        losses = []
        for step in range(2):
            share = mw.split_batch(batch(step), model)
            model.zero_grad()
            losses.append(model.backward(of_each_sample(model(share[0]), share), weight=len(share[0])))
            model.optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(float(model(batch(2)[0])[2]))
        return [*losses, float(model(batch(2)[0])[2].detach())]


def comparing_losses(plan: str) -> list[float] | str:
    """Return the losses of steps whose loss compares samples with one another, or the text of the refusal."""
    with mw.apply_plan(functools.partial(tempered, 0.0), plan, loss_fn=of_all_samples, optimizer=SGD, seed=1) as model:
        try:
            return [model.step(mw.split_batch(batch(step), model)).loss for step in range(2)]
        except mw.ApplyError as error:
            return str(error)
