"""Gradients of which several ranks have a term each, summed over these ranks; and when gradients leave a rank."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from meshwright.comm.communicator import Communicator

__all__: list[str] = []


class GradientExit(enum.Enum):
    """When an engine lets go of whole gradients; an engine around it adds up its own terms before that."""

    NEVER = "never"
    """`.grad` is whole on each rank, before `finish_gradients` and after it."""
    AT_END = "at the end"
    """`.grad` is whole until `finish_gradients`, which leaves this rank a piece."""
    IN_BACKWARD = "in backward"
    """Gradients go to their owners while backward runs."""


def sum_gradients(parameters: Iterable[nn.Parameter], group: Communicator) -> None:
    """Give each parameter, on every rank of the group, the sum of all ranks' gradients; one that no rank has used keeps none.

    A rank without a gradient brings zeros, since others may have theirs. Sparse gradients become dense; complex ones travel as
    pairs of numbers. One exchange for each dtype.
    """
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, []).append(parameter)
    for members in kinds.values():
        _sum_kind(members, group)


def _sum_kind(members: Sequence[nn.Parameter], group: Communicator) -> None:
    present = [parameter.grad is not None for parameter in members]
    terms = [_dense_term(parameter).reshape(-1) for parameter in members]
    # A sum of zeros and ones, exact in every floating dtype as long as there are fewer than 256 ranks.
    census = torch.tensor(present, dtype=terms[0].dtype, device=terms[0].device)
    flat = torch.cat([*terms, census])
    group.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
    *totals, counts = flat.split([*(term.numel() for term in terms), len(members)])
    # Where this rank has all of them there is nothing to be read, for which a GPU would be waited for.
    used = present if all(present) else [count != 0 for count in counts.tolist()]
    for parameter, total, is_used in zip(members, totals, used, strict=True):
        if not is_used:
            continue
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
        parameter.grad.copy_(total.view_as(parameter))


def _dense_term(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return gradient.to_dense() if gradient.is_sparse else gradient


def sum_term(shards: Communicator, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' terms of one gradient, which leaves while backward runs; of a sparse one, dense."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    total = dense.clone(memory_format=torch.contiguous_format)
    shards.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
    return total
