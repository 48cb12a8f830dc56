"""Outputs of a batch beside those of its parts, with the same random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.apply.randomness.forward_draws import DrawNote
from meshwright.apply.randomness.sample_dims import Call, find_dims

__all__: list[str] = []

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOSS_TOLERANCE = 1e-3
"""By how much the loss of the whole may differ from the mean of the parts' [fraction]."""
_LOW_TOLERANCE = 5e-2
"""By how much outputs of parts may differ from the whole's: another mask changes them by far more [fraction]."""


class Ran(Protocol):
    """A forward that has run."""

    num_samples: int
    outputs: list[Tensor]
    notes: dict[Call, DrawNote]
    loss: float

    @property
    def is_sound(self) -> bool:
        """Whether it has run to the end, with finite outputs."""
        ...


def is_mean_of(whole: Ran, pieces: Sequence[Ran]) -> bool:
    """Tell whether the loss of the whole is the mean over samples of that of pieces."""
    total = sum(piece.loss * piece.num_samples for piece in pieces) / sum(piece.num_samples for piece in pieces)
    return abs(total - whole.loss) <= _LOSS_TOLERANCE * abs(whole.loss)


def are_parts(whole: Ran, pieces: Sequence[Ran]) -> bool:
    """Tell whether the outputs of pieces, in their order, are those of the whole; scalars are taken for means over samples."""
    counts = [piece.num_samples for piece in pieces]
    columns = list(zip(whole.outputs, *(piece.outputs for piece in pieces), strict=False))
    if not columns or len({len(piece.outputs) for piece in (whole, *pieces)}) > 1:
        return False
    compared, means = 0, []
    for tensor, *parts in columns:
        if not tensor.is_floating_point():
            continue
        if tensor.dim() == 0:
            total = sum(float(part) * count for part, count in zip(parts, counts, strict=True))
            means.append(_are_close(tensor, torch.full_like(tensor, total / sum(counts))))
            continue
        shapes = [(count, tuple(part.shape)) for count, part in zip(counts, parts, strict=True)]
        found = find_dims([(whole.num_samples, tuple(tensor.shape)), *shapes])
        if found is None or found.dim is None:
            continue
        joined = [torch.cat(parts, found.dim)]
        if found.is_merged:  # in either order
            rows = [part.unflatten(found.dim, (-1, count)) for count, part in zip(counts, parts, strict=True)]
            joined.append(torch.cat(rows, found.dim + 1).flatten(found.dim, found.dim + 1))
        if not any(_are_close(tensor, one) for one in joined):
            return False
        compared += 1
    return bool(compared) or (bool(means) and all(means))


def draw_alike(runs: Sequence[Ran], others: Sequence[Ran]) -> bool:
    """Tell whether forwards have run to the end with finite outputs, and have drawn as others have: nothing else was decided."""
    shapes = [[{call: note.shape for call, note in one.notes.items()} for one in made] for made in (runs, others)]
    return shapes[0] == shapes[1] and all(other.is_sound for other in others)


def are_alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Tell whether two runs of one batch have the same outputs."""
    return len(one) == len(other) and all(_are_close(*pair) for pair in zip(one, other, strict=True))


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = _TOLERANCES.get(one.dtype.to_real(), _LOW_TOLERANCE)
    wide = torch.complex128 if one.is_complex() else torch.float64
    gap = (one.to(wide) - other.to(wide)).abs().masked_fill(one == other, 0.0)  # infinities of masks are equal, too
    scale = one.abs().masked_fill(one.isinf(), 0.0).max()
    return math.isfinite(largest := float(gap.max())) and largest <= tolerance * float(scale)
