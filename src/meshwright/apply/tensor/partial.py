"""Partial gradients: each rank that shares layers has a term, and the terms are summed at the end of backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.comm.communicator import Communicator

__all__: list[str] = []


def sum_partial(parameters: Iterable[nn.Parameter], shards: Communicator) -> None:
    """Sum gradients of which each rank has a term; a rank without one contributes zeros, since others may have theirs."""
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, []).append(parameter)
    for dtype, members in kinds.items():
        terms = [torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad for p in members]
        census = torch.tensor([p.grad is not None for p in members], dtype=dtype, device=terms[0].device)
        flat = torch.cat([*(term.reshape(-1) for term in terms), census])
        shards.all_reduce(flat)
        *totals, counts = flat.split([*(term.numel() for term in terms), len(members)])
        present = [p.grad is not None for p in members]
        there = present if all(present) else [bool(count) for count in counts.tolist()]
        for parameter, term, total, is_there in zip(members, terms, totals, there, strict=True):
            if is_there:
                term.copy_(total.view_as(term))
                parameter.grad = term


def sum_term(shards: Communicator, gradient: Tensor) -> Tensor:
    """Return the sum of the ranks' terms of one gradient."""
    total = gradient.clone(memory_format=torch.contiguous_format)
    shards.all_reduce(total)
    return total
