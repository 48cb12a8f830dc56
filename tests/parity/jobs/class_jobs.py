"""Models whose code looks at the classes of their layers, and forwards that a script gives to a class later on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _scaled(self: Block, x: Tensor) -> Tensor:
    return x + 0.5 * self.down(torch.tanh(self.up(x)))


SCALES: dict[Any, float] = {Block: 0.5}


class Asking(nn.Module):
    """Scales what layers give by their class."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self._scale(layer)
        return self.head(x)

    def _scale(self, layer: nn.Module) -> float:
        if self.kind == "table":
            return SCALES.get(type(layer), 2.0)
        if self.kind == "equal":
            return 0.5 if type(layer) == Block and layer.__class__ != nn.Linear else 2.0  # noqa: E721
        if self.kind == "contained":
            return 0.5 if type(layer) in (nn.Linear, Block) and type(layer) in {Block} else 2.0
        return 0.5 if isinstance(self.layers[0], type(layer)) and issubclass(type(layer), type(self.layers[1])) else 2.0


class Exact(Asking):
    """Asks by `is`."""

    def _scale(self, layer: nn.Module) -> float:
        return 0.5 if type(layer) is Block else 2.0


KINDS = ("table", "equal", "contained", "instance")


def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


def steps(build: Any, plan: str, *, replaces: bool = False) -> list[float]:
    """Return the losses of three steps; `replaces` gives the class another forward before the last one."""
    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    model = mw.apply_plan(lambda: build().double(), plan, loss_fn=loss_fn, optimizer=optimizer, seed=0)
    generator, losses, plain = torch.Generator().manual_seed(1), [], Block.forward
    try:
        for number in range(3):
            if replaces and number == 2:
                Block.forward = _scaled
            x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
            batch = x, torch.randint(0, 3, (8,), generator=generator)
            losses.append(model.step(mw.split_batch(batch, model)).loss)
    finally:
        Block.forward = plain
    return losses
