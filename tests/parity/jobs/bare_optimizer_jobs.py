"""Optimizers that do not call torch's constructor, as published wrappers of other optimizers leave it out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw


class Bare(torch.optim.Optimizer):
    """Plain descent."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Ahead(torch.optim.Optimizer):
    """Lookahead: slow weights that follow those of another optimizer."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.steps = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True) if self.steps % 2 == 0 else ():
            for parameter, value in zip(group["params"], slow, strict=True):
                parameter.copy_(value.lerp_(parameter, 0.5))


def bare(parameters: Any) -> torch.optim.Optimizer:
    return Bare(parameters)


def ahead(parameters: Any) -> torch.optim.Optimizer:
    return Ahead(torch.optim.SGD(parameters, lr=0.1))


def train(make: Any, line: str, *, in_own_loop: bool = False) -> list[float]:
    """Return the losses of five steps in float64, under a schedule of the learning rate."""
    torch.manual_seed(0)
    model = mw.apply_plan(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
        line,
        loss_fn=_square,
        optimizer=make,
    )
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.9)  # type: ignore[arg-type]
    found = []
    for step in range(5):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        batch = mw.split_batch((x, x[:, :2]), model)
        if in_own_loop:
            model.zero_grad()
            found.append(model.backward(_square(model(batch[0]), batch), weight=len(batch[0])))
            model.optimizer.step()  # type: ignore[union-attr]
        else:
            found.append(model.step(batch).loss)
        schedule.step()
    model.close()
    return found


def alone(make: Any) -> list[float]:
    """Return the losses of the same steps in plain torch."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer, found = make(list(module.parameters())), []
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = _square(module(x), (x, x[:, :2]))
        module.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _square(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs - batch[1]).square().mean()
