"""Models and losses whose own code runs backward, in a step's forward; for ranks."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw

STEPS = 3


class Plain(nn.Module):
    """A small model, whose subclasses run backward somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.own(x)
        return self.down(torch.tanh(self.up(x)))

    def own(self, x: Tensor) -> None:
        """Run backward, or nothing."""


class WithGraph(Plain):
    """Where there is a graph: trials without one do not see it."""

    def own(self, x: Tensor) -> None:
        if torch.is_grad_enabled():
            self.up.weight.square().sum().backward()


class Enabled(Plain):
    """In a context of its own, without a graph around it, too."""

    def own(self, x: Tensor) -> None:
        with torch.enable_grad():
            self.down(torch.tanh(self.up(x))).square().mean().backward()


class Named(Plain):
    """For some parameters, by their names."""

    def own(self, x: Tensor) -> None:
        with torch.enable_grad():
            torch.autograd.backward(self.down(self.up(x)).square().mean(), inputs=[self.up.bias])


class Repeated(Plain):
    """Through a checkpoint that makes its graph in backward."""

    def own(self, x: Tensor) -> None:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            checkpoint(self.up, given, use_reentrant=True).square().mean().backward()


class Late(Plain):
    """From the second step on: forwards of the first batch show nothing."""

    def own(self, x: Tensor) -> None:
        if x.mean() > 50:
            with torch.enable_grad():
                self.up.weight.square().sum().backward()


class InHook(Plain):
    """A loss of its own in backward, in a hook: as local losses are."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if h.requires_grad:
            held = h.detach()
            h.register_hook(lambda _: self.train_local(held))
        return self.down(h)

    def train_local(self, h: Tensor) -> None:
        """Run backward from the local loss."""
        with torch.enable_grad():
            (self.local(h) - 1).square().mean().backward()


class OfInputs(Plain):
    """For the inputs alone: each rank's are its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (given.sin().square().sum()).backward()
        return super().forward(x + 0.1 * given.grad)


class _Reversible(torch.autograd.Function):
    """A function that computes its forward again in its backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x).detach()

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(given), slope)
        return given.grad, None


class Reversible(Plain):
    """A layer whose backward runs another one: that is a part of the step's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(
            torch.is_grad_enabled()
        )  # as the stem of such a model, without which it has no backward
        return super().forward(_Reversible.apply(x, self.first))


KINDS = {kind.__name__: kind for kind in (WithGraph, Enabled, Named, Repeated, Late, InHook, OfInputs, Reversible)}


def build(kind: str) -> nn.Module:
    """Return a model in float64."""
    torch.manual_seed(0)
    return KINDS[kind]().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step; large numbers come with the second, to the first rank's samples."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(6, 6, generator=made, dtype=torch.float64)
    if step:
        x[:3] += 100.0
    return x, torch.randn(6, 3, generator=made, dtype=torch.float64)


def squares(outputs: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean of squared differences."""
    return (outputs - given[1]).square().mean()


def plainly(kind: str) -> dict[str, Tensor]:
    """Return the state after a plain loop."""
    module = build(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for step in range(STEPS):
        squares(module(batch(step)[0]), batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def train(kind: str, line: str, loop: str = "step") -> dict[str, Tensor]:
    """Train under a plan."""
    sgd = functools.partial(torch.optim.SGD, lr=1e-3)
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=squares, optimizer=sgd)
    for step in range(STEPS):
        given = mw.split_batch(batch(step), model)
        if loop == "step":
            model.step(given)
            continue
        model.backward(model.loss(given))
        model.optimizer.step()
        model.zero_grad()
    return model.full_state_dict()
