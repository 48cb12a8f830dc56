"""Parts whose code reads numbers of a parameter, or sizes of what is cut, beside one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.textbook_loop import steps_of
from torch import Tensor, nn

import meshwright as mw

WIDTH, HIDDEN, NUM_STEPS, THRESHOLD = 8, 16, 6, 0.255

READS: dict[str, Callable[[Tensor], bool]] = {
    "item": lambda gate: gate.item() > THRESHOLD,
    "bool": lambda gate: bool(gate > THRESHOLD),
    "float": lambda gate: float(gate.detach()) > THRESHOLD,
    "data": lambda gate: bool(gate.data > THRESHOLD),
    "int": lambda gate: int(gate.detach() * 1000) > THRESHOLD * 1000,
    "numpy": lambda gate: bool(gate.detach().numpy() > THRESHOLD),
}


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).softmax(-2).flatten(-2)


SIZES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numel of a weight": lambda h, weight: h * (weight.sum() / weight.numel()),
    "nelement": lambda h, _: h * (10.0 / h.nelement()),
    "size(-1)": lambda h, _: h * h.size(-1) ** -0.5,
    "shape[-1] of a weight": lambda h, weight: h * weight.shape[0] ** -0.5,
    "heads": lambda h, _: _heads(h, 4),
    "full": lambda h, _: h * torch.full((h.shape[-1],), 1.0 / h.shape[-1], dtype=h.dtype),
    "arange": lambda h, _: h + torch.arange(h.shape[-1], dtype=h.dtype),
    "linspace": lambda h, _: h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype),
    "len": lambda h, _: h / len(h[0, 0]),
    "len of a weight": lambda h, weight: h / len(weight),
    "layer_norm": lambda h, _: F.layer_norm(h, h.shape[-1:]),
    "view std": lambda h, _: h / (1 + h.view(h.size(0), -1).std(1)[:, None, None]),
    "std": lambda h, _: h / (1 + h.std(-1, keepdim=True)),
    "shape unpacked": lambda h, _: h / next(reversed(h.shape)),
    "sum by size": lambda h, _: h - h.sum(-1, keepdim=True) / h.size(-1),
    "branch": lambda h, _: h.sin() if h.shape[-1] > 8 else h.cos(),
    "chunk of a half": lambda h, _: h * F.pad(h[..., : h.shape[-1] // 2], (0, h.shape[-1] - h.shape[-1] // 2)),
    "prod": lambda h, _: h / (h.shape[-1] * h.shape[1]),
    "numel of a list": lambda h, _: h / sum(t.numel() for t in [h[0, 0]]),
    "new_ones": lambda h, _: h / h.new_ones(h.shape[-1]).sum(),
    "ones_like": lambda h, _: h / torch.ones_like(h).sum(-1, keepdim=True),
    "normalize": lambda h, _: F.normalize(h, dim=-1),
    "length": lambda h, _: h / h.shape[1] * h.size(1) ** 0.5,
    "mean by length": lambda h, _: h - h.sum(1, keepdim=True) / h.size(1),
    "arange of length": lambda h, _: h + torch.arange(h.shape[1], dtype=h.dtype)[:, None],
}


class Part(nn.Module):
    """A feed-forward part: what it does in the middle is given."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.middle = middle
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(SIZES[self.middle](self.up(x), self.up.weight)))


class Gated(nn.Module):
    """A part that takes another function, which cannot be cut, once its gate has grown; the gate is one number or as the rest."""

    def __init__(self, read: str, *, is_cut: bool) -> None:
        super().__init__()
        self.read, self.is_cut = read, is_cut
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gate = nn.Parameter(torch.full((HIDDEN,), 0.25) if is_cut else torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) * (1 + self.gate)
        grown = READS[self.read](self.gate.mean())
        return self.down(hidden.softmax(-1) if grown else F.gelu(hidden)) * self.gate.mean()


class Net(nn.Module):
    """Two parts between an embedding and a head; between the parts, a gate of the model's own may be read."""

    def __init__(self, make: Callable[[], nn.Module], read: str | None) -> None:
        super().__init__()
        self.read = read
        self.embed, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12)
        self.parts = nn.ModuleList([make() for _ in range(2)])
        self.gate = nn.Parameter(torch.tensor(0.25))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for part in self.parts:
            y = part(x)
            if self.read is not None and READS[self.read](self.gate):
                y = y - y.mean(1, keepdim=True)
            x = x + y * self.gate
        return self.head(x)


def mean(outputs: Tensor, pair: Any) -> Tensor:
    """Return the loss."""
    return F.cross_entropy(outputs.flatten(0, 1), pair[1].flatten())


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 12, (4, 6), generator=generator) for _ in range(2))
    return ids, labels


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.03)


def _build(make: Callable[[], nn.Module], read: str | None) -> Net:
    torch.manual_seed(0)
    return Net(make, read).double()


def _plainly(model: Net) -> tuple[list[float], list[float]]:
    losses, gates = list[float](), list[float]()
    steps = steps_of(model, [_batch()] * NUM_STEPS, mean, optimizer=_optimizer(model.parameters()))
    for _ in range(NUM_STEPS):
        gate = model.gate if model.read is not None else next(model.parts.children()).get_parameter("gate")
        gates.append(gate.mean().item())
        losses.append(next(steps))
    return losses, gates


def _planned(model: nn.Module) -> list[float]:
    planned = mw.apply_plan(model, "tp=2", loss_fn=mean, optimizer=_optimizer)
    return [planned.step(mw.split_batch(_batch(), planned)).loss for _ in range(NUM_STEPS)]


def gated(read: str) -> list[tuple[float, float, float, float]]:
    """Return (difference, the gate at first and at most, threshold) of branches on a gate in parts, cut and not, and between."""
    found: list[tuple[float, float, float, float]] = []
    for is_cut, outside in ((False, None), (True, None), (False, read)):

        def make(is_cut: bool = is_cut, outside: str | None = outside) -> nn.Module:
            return Part("size(-1)") if outside is not None else Gated(read, is_cut=is_cut)

        losses, gates = _plainly(_build(make, outside))
        found.append((_gap(_planned(_build(make, outside)), losses), gates[0], max(gates), THRESHOLD))
    return found


def sized(name: str) -> float:
    """Return by how much losses differ from one device's, at most [fraction]."""
    model = _build(lambda: Part(name), "item")
    return _gap(_planned(_build(lambda: Part(name), "item")), _plainly(model)[0])


def _gap(found: list[float], expected: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


class Scaled(nn.Module):
    """A layer whose size is read outside of it, by a name of `OUTSIDE`."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read
        self.embed, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 60)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)) / OUTSIDE[self.read](self.head.weight)


OUTSIDE: dict[str, Callable[[Tensor], float]] = {
    "numel": lambda weight: weight.numel(),
    "shape": lambda weight: weight.shape[0],
    "size": lambda weight: weight.size(0),
    "len": len,
}


def scaled(read: str) -> float:
    """Return by how much losses differ from one device's where a size is read outside of a layer, at most [fraction]."""
    torch.manual_seed(0)
    model = Scaled(read).double()
    plain = copy.deepcopy(model)
    steps = steps_of(plain, [_batch()] * NUM_STEPS, mean, optimizer=_optimizer(plain.parameters()))
    return _gap(_planned(model), [next(steps) for _ in range(NUM_STEPS)])
