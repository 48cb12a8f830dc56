"""Models that raise without gradients, where a rank has no samples in the first batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw


class Slope(nn.Module):
    """Adds the slope of its own result over its input: a forward that needs gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.layers(x)
        slope = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
        return y + 0.1 * slope.square().mean(-1, keepdim=True)


def square(outputs: Any, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def build() -> Slope:
    torch.manual_seed(0)
    return Slope().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(n, 3), draw(n, 2)) for n in (1, 4)]


def steps_on_shares(plan: str) -> tuple[list[float], dict[str, Tensor]]:
    """Take steps in the first of which rank 0 alone has a sample."""
    with mw.apply_plan(build, plan, loss_fn=square, optimizer=functools.partial(torch.optim.SGD, lr=0.1)) as model:
        world = mw.current_world()
        rank, size = (0, 1) if world is None else (world.rank, 2)
        losses = []
        for batch in batches():
            shares = [tensor.tensor_split(size)[rank] for tensor in batch]
            losses.append(model.step(tuple(shares)).loss)
        return losses, model.full_state_dict()


def steps_on_one_device() -> tuple[list[float], dict[str, Tensor]]:
    module, losses = build(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        loss = square(module(batch[0]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()
