"""Parts of batches, joined and changed, and the distance of what parts give from what the whole gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

ROUNDINGS = 32.0
"""How many times the difference that another order of the samples makes is tolerated [ratio]."""


def gap_of(whole: float, values: Sequence[float], weights: Sequence[float], *, divide: bool = True) -> float:
    """Return the relative distance of the parts' weighted mean (or sum) from the whole; infinite where it is not finite."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    total = sum(weight for _, weight in pairs)
    if not total:
        return math.inf
    together = sum(value * weight for value, weight in pairs) / (total if divide else 1.0)
    scale = max([abs(whole), *(abs(value) for value, _ in pairs)])
    gap = abs(together - whole) / scale if scale else 0.0
    return gap if math.isfinite(gap) else math.inf


def turn(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor in reverse order."""
    return tensor.flip(0) if tensor.dim() > 0 else tensor


def join_samples(samples: Sequence[Any]) -> Any:
    """Return parts of a batch as one, in this order; None where their tensors do not fit."""
    columns = list(zip(*(tensors_in(sample) for sample in samples), strict=False))
    if any(len({tensor.shape[1:] for tensor in column}) > 1 for column in columns):
        return None
    joined = iter([torch.cat(column) if column[0].dim() > 0 else column[0] for column in columns])
    return map_tensors(samples[0], lambda _: next(joined))


def second_sample(sample: Any) -> Any:
    """Return another sample made from one: its rows are rolled by one place, which changes no value."""
    return map_tensors(sample, lambda t: torch.roll(t, 1, 1) if t.dim() > 1 else t)
