"""Global gradient norm, and clipping by it, as on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright._torch_private import foreach_mul_, foreach_norm

__all__: list[str] = []

_ADDED = 1e-6
"""What torch's rule adds to a norm before it divides by it."""
_CLEARLY_BELOW = 0.99
"""Share of the limit up to which no dtype's rounding makes the factor less than 1."""


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor that holds each entry of a gradient once, of a sparse one those that are there; to be scaled in place."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def total_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 2-norm over all tensors, a scalar; 0 where there are none.

    A finite gradient whose squares overflow its dtype is measured again in float64.
    """
    if not tensors:
        return torch.zeros((), device=device)
    dense = [values_of(tensor) for tensor in tensors]
    norm = torch.nn.utils.get_total_norm(dense)
    if math.isfinite(norm.item()):
        return norm
    return torch.linalg.vector_norm(torch.stack([_norm_in_float64(tensor).to(device) for tensor in dense]))


def squares_of(tensors: Sequence[torch.Tensor], device: torch.device, *, exact: bool) -> torch.Tensor:
    """Return the sum of all entries' squares, a float64 scalar; `exact` takes each square in float64, too."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if exact:
        for tensor in tensors:
            total += _norm_in_float64(tensor).square()
        return total
    for dtype in {tensor.dtype for tensor in tensors}:
        norms = foreach_norm([tensor for tensor in tensors if tensor.dtype == dtype])
        total += torch.stack(norms).abs().double().square().sum()
    return total


def _norm_in_float64(tensor: torch.Tensor) -> torch.Tensor:
    # Of complex numbers torch takes a complex dtype alone here.
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return torch.linalg.vector_norm(real, dtype=torch.float64)


def clip_(tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the tensors in place to a norm of at most `max_norm`, by the rule of torch.nn.utils.clip_grad_norm_.

    The caller has waited for the norm: where it is clearly below, a factor of 1 is not written over every gradient.
    """
    if float(norm) + _ADDED <= _CLEARLY_BELOW * max_norm:
        return
    factor = torch.clamp(max_norm / (norm + _ADDED), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, members in by_device.items():
        foreach_mul_(members, factor.to(device))
