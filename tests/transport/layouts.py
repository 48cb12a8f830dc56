"""The same values at other places in memory: shifted, strided, transposed, expanded."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

LAYOUTS = ("plain", "offset", "strided", "transposed")
"""Layouts that can be written to; `expanded` is for inputs only, its rows share their memory."""

_MARGIN = 3  # entries before and after: an address that no vector instruction likes
_CANARY = 77


@dataclasses.dataclass
class Placed:
    """A tensor, and the memory around it, which nobody may touch."""

    tensor: Tensor
    base: Tensor | None = None
    outside: Tensor | None = None

    def surroundings_are_intact(self) -> bool:
        """Whether the memory between and beside the tensor's entries still holds what it did."""
        if self.base is None or self.outside is None:
            return True
        rest = self.base[self.outside]
        return torch.equal(rest, torch.full_like(rest, _CANARY))


def place(value: Tensor, layout: str) -> Placed:
    """Copy values to memory of their own, in the given layout."""
    if layout == "transposed" and value.ndim < 2:
        layout = "strided"
    if layout == "plain" or value.ndim == 0:
        return Placed(value.clone(memory_format=torch.contiguous_format))
    if layout == "expanded":
        return Placed(value[:1].clone().expand(value.shape))
    rows, *others = value.shape
    if layout == "offset":
        base = torch.full((value.numel() + 2 * _MARGIN,), _CANARY).to(value.dtype)
        index = slice(_MARGIN, _MARGIN + value.numel())
        tensor, outside = base[index].view(value.shape), torch.ones_like(base, dtype=torch.bool)
        outside[index] = False
    elif layout == "strided":
        base = torch.full((2 * rows + 1, *others), _CANARY).to(value.dtype)
        tensor, outside = base[1::2], torch.ones_like(base, dtype=torch.bool)
        outside[1::2] = False
    else:
        base = torch.full((*reversed(others), rows), _CANARY).to(value.dtype)
        tensor, outside = base.permute(*reversed(range(value.ndim))), torch.zeros_like(base, dtype=torch.bool)
    tensor.copy_(value)
    return Placed(tensor, base, outside)


def seen_through(value: Tensor, layout: str) -> Tensor:
    """What the values are once they are placed: expanded rows all equal the first one."""
    return value[:1].expand(value.shape) if layout == "expanded" and value.ndim > 0 else value
