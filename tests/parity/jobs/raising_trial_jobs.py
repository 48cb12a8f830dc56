"""Models that raise without gradients, where a rank has no samples in the first batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.parity.jobs.textbook_loop import losses_of
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
    module = build()
    return losses_of(module, batches(), square), module.state_dict()


class Wary(nn.Linear):
    """Takes no large numbers without gradients, once it is told so."""

    is_wary = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_wary and not torch.is_grad_enabled() and bool(x.max() > LARGE):
            raise ValueError("large numbers")
        return super().forward(x)


LARGE = 5.0


def build_wary() -> nn.Module:
    torch.manual_seed(0)
    layers = [Wary(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double()


def steps_of_which_one_share_raises(plan: str) -> tuple[list[float], list[float]]:
    """Return losses of steps in which only the first share's samples raise in trials, and one device's."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batches = [(draw(n, 3), draw(n, 2)) for n in (4, 6, 8)]
    for inputs, _ in batches:
        inputs[: len(inputs) // 2] += 2 * LARGE
    expected = losses_of(build_wary(), batches, square)
    sgd, losses = functools.partial(torch.optim.SGD, lr=0.1), []
    with mw.apply_plan(build_wary, plan, loss_fn=square, optimizer=sgd) as model:
        for batch in batches:
            losses.append(model.step(mw.split_batch(batch, model)).loss)
            next(model.module.children()).is_wary = True  # a change, after which the model is tried again
    return losses, expected
