"""The global gradient norm, and clipping by it, as on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__: list[str] = []


def total_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 2-norm over all tensors, a scalar; 0 where there are none.

    A finite gradient whose squares overflow its dtype is measured again in float64.
    """
    if not tensors:
        return torch.zeros((), device=device)
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    norm = torch.nn.utils.get_total_norm(dense)
    if not math.isfinite(norm.item()):
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64).to(device) for tensor in dense]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_(tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the tensors in place such that their norm is at most `max_norm`: torch.nn.utils.clip_grad_norm_'s rule."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device))
