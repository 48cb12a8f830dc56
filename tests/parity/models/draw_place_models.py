"""Models that draw in one module at several places in its code, of which the values of a batch decide, and on several stages."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH = 8, 5


class Branch(nn.Module):
    """Two layers of which the first is cut by columns, behind an adapter that a batch of other values leaves out.

    One dropout drops for all three: with two ranks, what it is given has the same shape inside of the cut and outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Return the result (samples, length, width)."""
        if bool((kinds == 1).any()):
            x = x + self.drop(self.adapter(x))
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))


class Looped(nn.Module):
    """Three layers in a loop with one dropout, of which the second is cut by columns, and other values leave out the first."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)])
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Return the result (samples, length, width)."""
        for place, part in enumerate(self.parts):
            if place > 0 or bool((kinds == 1).any()):
                x = self.drop(torch.tanh(part(x)))
        return x


class LeftOut(nn.Module):
    """Layers with dropouts of their own, inside of a cut and behind it; batches of other values leave out the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2)
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Return the result (samples, length, width)."""
        for place, block in enumerate(self.blocks):
            if place != 1 or bool((kinds == 1).any()):
                x = x + block(x)
        return x


class ChosenFirst(nn.Module):
    """Experts whose tokens are all chosen before any of them drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Return the result (samples, length, width)."""
        flat, found = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        rows = [(kinds.flatten() == kind).nonzero()[:, 0] for kind in range(3)]
        chosen = [(kind, flat[own]) for kind, own in enumerate(rows) if len(own)]
        for kind, given in chosen:
            inner = F.dropout(F.gelu(self.up[kind](given)), 0.2, self.training)
            found = found.index_add(0, rows[kind], F.dropout(self.down[kind](inner), 0.2, self.training))
        return found.view_as(x)


class ByKind(nn.Module):
    """Layers that are told each token's kind, which the inputs hold."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Return the result (samples, length, width)."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x, kinds)
        return self.last(x)


class Experts(nn.Module):
    """Experts that are called one after another, each with its tokens; those without any are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Return the result (samples, length, width)."""
        flat, found = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        for kind in range(3):
            rows = (kinds.flatten() == kind).nonzero()[:, 0]
            if len(rows):
                inner = self.drop(F.gelu(self.up[kind](flat[rows])))
                found = found.index_add(0, rows, self.drop(self.down[kind](inner)))
        return found.view_as(x)


class OneDropout(ByKind):
    """Such layers with one dropout for all."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        drop = nn.Dropout(0.2)
        for layer in self.layers:
            layer.drop = drop


class Unpadded(nn.Module):
    """Layers over tokens without padding, and dropout between them.

    Args:
        way: What drops: "function", "module" of the model, or "layer" with two dropouts that runs behind each other layer.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        drops = (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
        self.shared = nn.Sequential(*drops) if way == "layer" else None

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Return the result (samples, length, width); tokens of kind 2 are padding."""
        mask = kinds != 2
        flat = self.first(x)[mask]
        for layer in self.layers:
            inner = layer(flat)
            if self.shared is not None:
                inner = self.shared(inner)
            else:
                inner = self.drop(inner) if self.way == "module" else F.dropout(inner, 0.2, self.training)
            flat = flat + inner
        found = x.new_zeros(x.shape)
        found[mask] = flat
        return self.last(found)


def _pattern(number: int, step: int, name: str) -> Tensor:
    rows, places = torch.arange(number)[:, None], torch.arange(LENGTH)
    if name in ("branch", "branch later", "left out later", "looped", "one dropout"):
        return torch.full((number, LENGTH), int((step % 2 == 0) != name.endswith(" later")))
    if name == "one dropout of experts":
        return (rows + places) % (3 if step == 0 else 1 + step % 2) + (step == 2)
    if name == "chosen first":
        return torch.full((number, LENGTH), 2) if step == 0 else (rows + places) % 3
    return torch.where(places < (rows * 3 + step) % LENGTH + 1, 0, 2) * (step > 0)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "branch": functools.partial(ByKind, Branch),
    "branch later": functools.partial(ByKind, Branch),
    "left out later": LeftOut,
    "looped": functools.partial(ByKind, Looped),
    "one dropout": functools.partial(OneDropout, Branch),
    "one dropout of experts": functools.partial(OneDropout, Experts),
    "chosen first": functools.partial(ByKind, ChosenFirst),
    "unpadded function": functools.partial(Unpadded, "function"),
    "unpadded module": functools.partial(Unpadded, "module"),
    "unpadded layer": functools.partial(Unpadded, "layer"),
}


def batch(name: str, step: int, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and targets, whose first batch shows other branches, or less padding, than the later ones."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(number, LENGTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"x": x, "kinds": _pattern(number, step, name)}, y
