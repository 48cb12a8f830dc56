"""Layers whose settings a script changes between steps: what they return depends on them, on stages that do not run them too."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.measure.oracle import whole_batch_loss

WIDTH = 8


class Layer(nn.Module):
    """A layer that returns (hidden, a number or None), of as many columns as it is set to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.ReLU()
        self.factor = 1
        self.columns = WIDTH
        self.options = types.SimpleNamespace(adds=False)
        self.register_buffer("rows", torch.arange(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Any, int]:
        y = self.down(torch.tanh(self.up(self.act(x))))[..., : self.columns][:, self.rows]
        return y, y.mean((1, 2), keepdim=True) if self.options.adds else None, self.factor


class Model(nn.Module):
    """Layers with code between them that uses all that they return, and the input that they may write over."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        more = torch.zeros(())
        for layer in self.layers:
            held = x + 0.0
            y, extra, factor = layer(held)
            more = more if extra is None else more + extra
            missing = (0, WIDTH - y.shape[2], 0, 4 - y.shape[1])
            x = held + factor * nn.functional.pad(y, missing) * y.shape[2] / y.shape[1] / WIDTH
        return self.head(x) + more


def _set(module: nn.Module, step: int) -> None:
    for layer in module.layers:  # type: ignore[union-attr]
        layer.factor = [1, 2, 1, 1, 1, 1][step]
        layer.columns = [8, 8, 3, 8, 8, 8][step]
        layer.options.adds = step == 3
        layer.act.inplace = step == 4
        layer.rows = torch.arange([4, 4, 4, 4, 4, 2][step])


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).pow(2).mean()


def trained(plan: str) -> tuple[list[float], list[float]]:
    """Return the losses of six steps under a plan and of one process, other settings in each."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 4, 4, WIDTH, generator=generator, dtype=torch.float64).unbind() for _ in range(6)]
    torch.manual_seed(0)
    alone = Model().double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    expected = []
    for step, batch in enumerate(batches):
        _set(alone, step)
        optimizer.zero_grad()
        loss = whole_batch_loss(alone, tuple(batch), _loss)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model = mw.apply_plan(
        lambda: Model().double(), plan, loss_fn=_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0
    )
    found = []
    try:
        for step, batch in enumerate(batches):
            _set(model.module, step)
            found.append(model.step(mw.split_batch(tuple(batch), model)).loss)
    finally:
        model.close()
    return found, expected
