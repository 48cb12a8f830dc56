"""Models in which values of the first layers decide sizes and Python numbers that code on later stages uses."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.jobs.never_wrong_pipeline_states import WIDTH, tanh_block
from torch import Tensor, nn
from torch.nn import functional as F


class CountedSizes(nn.Module):
    """Takes a number of the first layer as a size, as a tensor: slices, lengths of new tensors, numbers of parts and classes.

    What lies behind that size is zero, so that each sample's result is its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x).relu().sort(1, descending=True).values
        count = (h > 0).sum(1).max().clamp(min=1)
        first = h[:, :count] * (1 + torch.arange(count)) * h.new_ones(count)
        padded = F.pad(first, (0, WIDTH - count))
        part = h.split(count, 1)[0].sum(1, keepdim=True) + h.narrow(1, 0, count).repeat(1, count).amax(1, keepdim=True)
        classes = F.one_hot(torch.zeros(len(h), dtype=torch.long), count + 5)[:, :WIDTH].to(h.dtype)
        h = self.blocks[1](padded) + part
        return self.blocks[3](self.blocks[2](h + 0.1 * classes) + first.topk(count, 1).values.sum(1, keepdim=True))


class _Trims(nn.Module):
    """Returns as many columns as the longest sample has; those behind it are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.line(x).relu().sort(1, descending=True).values
        lengths = (h > 0).sum(1)
        return h[:, : max(int(lengths.max()), 1)], lengths


class SizedResults(nn.Module):
    """A layer whose result has a size that its values decide, and code on later stages that counts by it."""

    def __init__(self) -> None:
        super().__init__()
        self.trims, self.blocks = _Trims(), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        short, lengths = self.trims(x)
        h = self.blocks[0](F.pad(short, (0, WIDTH - short.shape[1])))
        for place in range(short.shape[1]):
            h = h + 0.1 * (place + 1) * short[:, place : place + 1]
        h = self.blocks[1](h * torch.ones(short.shape[1]).mean())
        return self.blocks[2](h + short.mean(1, keepdim=True) * short.shape[1] + 0.1 * lengths[:, None])


class _Measures(nn.Module):
    """Returns Python numbers of its values beside its result: how long the longest sample is, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        h = self.line(x).relu().sort(1, descending=True).values
        longest = max(int((h > 0).sum(1).max()), 1)
        return h, {"longest": longest, "parts": [h[:, place] for place in range(longest)]}


class TellsNumbers(nn.Module):
    """Code on later stages that uses a layer's Python numbers, and as many tensors as values have made."""

    def __init__(self) -> None:
        super().__init__()
        self.measures, self.blocks = _Measures(), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h, found = self.measures(x)
        for block in self.blocks:
            h = block(h)
        for place, part in enumerate(found["parts"]):
            h = h + 0.1 * (place + 1) * part[:, None]
        return h + (h[:, : found["longest"]].sum(1) / found["longest"] * 0.0)[:, None]


class _Warms(nn.Module):
    """Returns other keys, nothing in place of a tensor, and a tensor without gradients, once its number has left one a little.

    None of the values that stand in for its number's is as near, so that only another answer shows the branch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line, self.level = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        h, moved = self.line(x) * self.level, (self.level - 1.0).abs()
        if 1e-12 < moved < 0.1:
            return {"h": h, "warm": h.detach(), "rest": None}
        return {"h": h, "cold": h, "rest": h}


class BehindThreshold(nn.Module):
    """Code on later stages that asks what kind of results a layer has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.warms, self.blocks = _Warms(), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = self.warms(x)
        h, side = found["h"], found["warm"] if "warm" in found else found["cold"]
        for block in self.blocks:
            h = block(h)
        return h * (1.0 + (found["rest"] is None) + 0.5 * side.requires_grad) + 0.1 * side


class SetsNumber(nn.Module):
    """A layer that keeps a number of its values as an attribute, which code between layers uses by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.counts = _Counts()

    def scale(self) -> float:
        return 1.0 + 0.0 * self.counts.number

    def forward(self, x: Tensor) -> Tensor:
        x = self.counts(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale()


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.number = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        self.number = int((h > 0).sum())
        return h


FOUND: dict[str, float] = {}
"""What a layer has found, for all code to read."""


class _Finds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        FOUND["many"] = float(int((h > 0).sum()) > 50)  # no batch has as many
        return h


class SetsGlobal(nn.Module):
    """A layer that keeps a number of its values in a global, which code between layers uses."""

    def __init__(self) -> None:
        super().__init__()
        self.finds, self.blocks = _Finds(), nn.ModuleList(tanh_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.finds(x)
        for block in self.blocks:
            x = block(x)
        return x * (1.0 + FOUND["many"])


class SizedLast(nn.Module):
    """The same layer behind all others: no stage is left that could be told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.trims = nn.ModuleList(tanh_block() for _ in range(3)), _Trims()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        short, _ = self.trims(x)
        return short.sum(1) / short.shape[1]


@torch.library.custom_op("meshwright_tests::apart", mutates_args=())
def apart(points: Tensor, distance: float) -> Tensor:
    """Choose rows of [rows, width] that are further apart than a distance: an operator of a library, as torchvision's nms is."""
    kept: list[int] = []
    for row in range(len(points)):
        if all(bool((points[row] - points[other]).norm() > distance) for other in kept):
            kept.append(row)
    return torch.tensor(kept, dtype=torch.long, device=points.device)


@apart.register_fake
def _(points: Tensor, distance: float) -> Tensor:
    return points.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)


@torch.library.custom_op("meshwright_tests::halved", mutates_args=())
def halved(points: Tensor) -> Tensor:
    """Halve the rows [rows, width]: an operator whose result has one size, which it says."""
    return points * 0.5


@halved.register_fake
def _(points: Tensor) -> Tensor:
    return torch.empty_like(points)


class RegisteredReads(nn.Module):
    """Goes on with rows that a library's operator has chosen, and calls another one whose result has one size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        rows = torch.ops.meshwright_tests.apart(h.detach(), 0.5)
        h = h.index_add(0, rows, self.blocks[1](h[rows]))
        h = self.blocks[2](h)
        return self.blocks[3](h + halved(h.detach()))


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, levels: list[Tensor]) -> dict[str, Any]:
        largest = float(levels[0].detach().abs().max())
        return {"boxes": self.line(levels[-1]) / (1 + 0 * largest), "levels": levels}


class GivesBack(nn.Module):
    """The last layer reads a number, and gives back the very list that it was given: no number decides what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(tanh_block() for _ in range(3)), _Head()

    def forward(self, x: Tensor) -> Tensor:
        levels: list[Tensor] = []
        for block in self.blocks:
            x = block(x)
            levels.append(x)
        found = self.head(levels)
        return found["boxes"] + found["levels"][0]
