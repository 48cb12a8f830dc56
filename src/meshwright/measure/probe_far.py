"""Memory far away: what kernels take more where a pass goes through more memory than the caches of the host hold.

A forward writes what it keeps into memory that was last used a whole pass ago, and a backward reads it then. Caches of servers
hold hundreds of megabytes today, so small sets of tensors say nothing of it. One of the operands is far, as in a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import torch

from meshwright.measure.probe_sizes import SET_BYTES

__all__: list[str] = []

_FAR_SETS: Final = (SET_BYTES, 4 * SET_BYTES, 8 * SET_BYTES)
"""Of the sets that are gone through; more is added to what the smallest takes [bytes]."""

_HOST_SHARE: Final = 8
"""Of a host's memory, all ranks' largest sets together take at most one part in so many [count]."""

_ROWS, _WIDTH = 4096, 256
"""Of each tensor: 4 MiB, more than a core's own cache holds [count]."""

Timing = Callable[[Callable[[], object]], tuple[float, float]]


def far_sets(host_bytes: int, num_ranks: int) -> Sequence[int]:
    """Return the sizes of the sets that fit the host [bytes]."""
    return [size for size in _FAR_SETS if size * num_ranks * _HOST_SHARE <= host_bytes]


def measure_far(sets: Sequence[int], time_of: Timing) -> dict[str, tuple[float, float]]:
    """Return seconds for each byte that a sum, and a product, moves within each set.

    Args:
        sets: Their sizes [bytes].
        time_of: Returns the time of a call and its spread.
    """
    found: dict[str, tuple[float, float]] = {}
    values, weight = torch.ones(_ROWS, _WIDTH), torch.eye(_WIDTH)
    whole = [torch.ones(_ROWS, _WIDTH) for _ in range(max(sets, default=0) // values.nbytes)]
    for num_bytes in sets:
        ring = whole[: num_bytes // values.nbytes]
        for name, moved, kernel in (
            ("far_traffic", 3 * values.nbytes, lambda one, out: torch.add(one, values, out=out)),
            ("far_product", 2 * values.nbytes + weight.nbytes, lambda one, out: torch.mm(one, weight, out=out)),
        ):
            turns = itertools.pairwise(itertools.cycle(ring))
            seconds, spread = time_of(lambda kernel=kernel, turns=turns: kernel(*next(turns)))
            found[f"{name}_{num_bytes}"] = (seconds / moved, spread)
    return found
