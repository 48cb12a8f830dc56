"""Calls with fewer rows, on which most wrong regions are told apart: a window attention takes thousands of windows.

What differs on some of a call's rows is wrong. What does not is proven on all of them.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor, nn

from meshwright.apply.modules.copies import map_call
from meshwright.apply.tensor.guards.asked import sizes_of
from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.proof.scope_values import ScopeValues
from meshwright.apply.tensor.search.trace import Call
from meshwright.trees import tensors_in

__all__: list[str] = []

_LARGE = 2**15
"""Entries of a call's tensors from which it is tried with fewer rows first [count]."""

_MANY = 64
"""Entries of dim 0 that are taken for rows [count]."""

_LEAST = 5
"""Rows that are left at least; one or two would equal other things by chance [count]."""


def with_fewer_rows(call: Call) -> Call | None:
    """Return a call whose tensors have a part of their entries along dim 0; None where they have few, or are small.

    Args:
        call: A recorded call. Tensors whose numbers of rows divide the largest one keep their ratio to it.
    """
    tensors = [tensor for tensor in tensors_in((call.args, call.kwargs)) if tensor.dim() > 1]
    largest = max((len(tensor) for tensor in tensors), default=0)
    rows = {len(tensor) for tensor in tensors if len(tensor) >= _MANY and largest % len(tensor) == 0}
    if not rows or sum(tensor.numel() for tensor in tensors) < _LARGE:
        return None
    times = 1
    while math.gcd(*rows) % (2 * times) == 0 and min(rows) >= 2 * times * _LEAST:
        times *= 2
    taken = sizes_of((call.args, call.kwargs)) - rows
    while times > 1 and any(size // times in taken for size in rows):
        times //= 2  # each number of rows is a size of its own
    if times == 1:
        return None

    def first(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or len(tensor) not in rows:
            return tensor
        return tensor.detach()[: len(tensor) // times].requires_grad_(tensor.requires_grad)

    args, kwargs = map_call((call.args, call.kwargs), first)
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def experiment_with_fewer_rows(
    module: nn.Module, call: Call, num_tp_ranks: int, values: ScopeValues, *, only_asks: bool = False
) -> Experiment | None:
    """Return the experiment with fewer rows of a call; None where it has few, or code knows their number. Arguments as there."""
    few = with_fewer_rows(call)
    if few is None:
        return None
    try:
        return Experiment(module, few, num_tp_ranks, values=values, only_asks=only_asks)
    except Exception:  # noqa: BLE001 - whatever the user's code raises
        return None
