"""Global gradient norm, and clipping by it, as on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from meshwright._torch_private import foreach_mul_, foreach_norm

__all__: list[str] = []


def total_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 2-norm over all tensors, a scalar; 0 where there are none.

    A finite gradient whose squares overflow its dtype is measured again in float64.
    """
    if not tensors:
        return torch.zeros((), device=device)
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    return finite_norm(torch.nn.utils.get_total_norm(dense), lambda: dense, device)


def norm_of_norms(
    norms: Sequence[torch.Tensor], tensors: Callable[[], Sequence[torch.Tensor]], device: torch.device
) -> torch.Tensor:
    """Return the 2-norm over all tensors from the norms of their parts, a scalar; as `total_norm`."""
    if not norms:
        return torch.zeros((), device=device)
    return finite_norm(torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])), tensors, device)


def squares_of(tensors: Sequence[torch.Tensor], device: torch.device, *, exact: bool) -> torch.Tensor:
    """Return the sum of all entries' squares, a float64 scalar; `exact` takes each square in float64, too."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if exact:
        for tensor in tensors:
            total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
        return total
    for dtype in {tensor.dtype for tensor in tensors}:
        norms = foreach_norm([tensor for tensor in tensors if tensor.dtype == dtype])
        total += torch.stack(norms).abs().double().square().sum()
    return total


def finite_norm(
    norm: torch.Tensor, tensors: Callable[[], Sequence[torch.Tensor]], device: torch.device
) -> torch.Tensor:
    """Return the norm, computed again in float64 where it is not finite."""
    if math.isfinite(norm.item()):
        return norm
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64).to(device) for tensor in tensors()]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_(tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the tensors in place to a norm of at most `max_norm`, by the rule of torch.nn.utils.clip_grad_norm_."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, members in by_device.items():
        foreach_mul_(members, factor.to(device))
