"""Models whose hooks reach layers outside of their own, and models that write into their batch; for ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from tests.parity.harness import cut
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw

WIDTH, NUM_SAMPLES, NUM_STEPS = 8, 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Adapter(nn.Module):
    """A layer that counts its calls: each of them is another call to a part that is cut around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.num_calls = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.norm(self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.adapter, self.head = Adapter(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _closed_over(model: Net) -> None:
    adapter = model.adapter
    model.first.register_forward_hook(lambda _, args, out: out + adapter(args[0]))


def _default(model: Net) -> None:
    model.first.register_forward_hook(lambda _, args, out, adapter=model.adapter: out + adapter(args[0]))


def _listed(model: Net) -> None:
    adapters = [model.adapter]
    model.first.register_forward_hook(lambda _, args, out: out + adapters[0](args[0]))


def _weak(model: Net) -> None:
    adapter = weakref.ref(model.adapter)
    model.first.register_forward_hook(lambda _, args, out: out + adapter()(args[0]))  # type: ignore[misc]


HOOKS: dict[str, Callable[[Net], None]] = {
    "closed_over": _closed_over,
    "default": _default,
    "listed": _listed,
    "weak": _weak,
}


class Writing(nn.Module):
    """A model that writes into what it is given: a tensor, and an entry of a dict inside of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        x.mul_(1.5)
        extra["y"] = 0.5 * extra["y"]
        return self.layers(x) + extra["y"]


def _writing_loss(outputs: Tensor, batch: Any) -> Tensor:
    batch["z"].sub_(1.0)
    return (outputs - 2 * batch["extra"]["y"] - batch["z"]).square().mean() + batch["x"].square().mean()


def _batches(kind: str) -> list[Any]:
    source = torch.Generator().manual_seed(4)

    def draw() -> Tensor:
        return torch.randn(NUM_SAMPLES, WIDTH, generator=source, dtype=torch.float64)

    if kind == "writing":
        return [{"x": draw(), "extra": {"y": draw()}, "z": draw()} for _ in range(NUM_STEPS)]
    return [(draw(), draw()) for _ in range(NUM_STEPS)]


def _build(kind: str) -> nn.Module:
    torch.manual_seed(2)
    if kind == "writing":
        return Writing().double()
    model = Net().double()
    HOOKS[kind](model)
    return model


def _loss(kind: str) -> Callable[[Any, Any], Tensor]:
    return _writing_loss if kind == "writing" else lambda outputs, batch: (outputs - batch[1]).square().mean()


def plain(kind: str, num_parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and the state after training on one device, in as many micro-batches."""
    model, loss_fn = _build(kind), _loss(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in _batches(kind):
        optimizer.zero_grad()
        total = 0.0
        for part in cut(batch, [NUM_SAMPLES // num_parts] * num_parts):
            outputs = model(**part_of(part)) if isinstance(part, dict) else model(part[0])
            loss = loss_fn(outputs, part) / num_parts
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def part_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what the model takes of a batch."""
    return {name: batch[name] for name in ("x", "extra")}


class Taking(Writing):
    """The same, given the whole batch."""

    def forward(self, x: Tensor, extra: dict[str, Tensor], z: Tensor | None = None) -> Tensor:
        del z
        return super().forward(x, extra)


def trained(kind: str, line: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the same under a plan."""
    model = _build(kind)
    if kind == "writing":
        model.__class__ = Taking
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mw.apply_plan(model, mw.Plan.parse(line), optimizer=optimizer, loss_fn=_loss(kind)) as parallel:
        losses = [parallel.step(mw.split_batch(batch, parallel)).loss for batch in _batches(kind)]
        state = parallel.full_state_dict()
    return losses, {name: value.detach().clone() for name, value in state.items()}
