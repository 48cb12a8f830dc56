"""Differences between two runs of one module: the measured one, and the tolerated one."""

from __future__ import annotations

import torch
from torch import Tensor

__all__: list[str] = []

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of an entry, relative to the tensor's largest, that another order of sums is given, by dtype. In float64 it
is that of float32 inside: many models compute norms and losses in float32 whatever their dtype is."""


def tolerance_of(expected: Tensor) -> float:
    """Return the largest change of an entry by reordered sums, relative to the tensor's largest entry.

    Under autocast the dtype is that of autocast.
    """
    kind = expected.device.type
    is_cast = torch.is_autocast_enabled(kind) and expected.is_floating_point()
    return TOLERANCES.get(torch.get_autocast_dtype(kind) if is_cast else expected.dtype, 0.0)


def relative_difference(mine: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an entry, relative to the largest expected entry.

    For dtypes other than floats it is the share of entries that differ.
    """
    if mine.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((mine != expected).double().mean())
    same_nan = mine.isnan() & expected.isnan()
    gap = (mine.double() - expected.double()).masked_fill(same_nan | (mine == expected), 0.0).abs().max().item()
    scale = expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return gap / scale if scale else gap
