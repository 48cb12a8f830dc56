"""Gradients of which each rank that shares layers has a term, summed where they leave while backward runs."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.communicator import Communicator

__all__: list[str] = []


def sum_term(shards: Communicator, gradient: Tensor) -> Tensor:
    """Return the sum of the ranks' terms of one gradient; of a sparse one, dense."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    total = dense.clone(memory_format=torch.contiguous_format)
    shards.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
    return total
