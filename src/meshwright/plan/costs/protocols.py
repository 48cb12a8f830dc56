"""Protocols of a collective: what its steps wait for, and which of them is the fastest for a size, as NCCL chooses."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

__all__: list[str] = []

_SLICES: Final = 2
"""Slices of a part that a ring hands on one after the other [count]. Source: NCCL, src/include/collectives.h,
ALLGATHER_CHUNKSTEPS over ALLGATHER_SLICESTEPS, read 2026-11-27."""

_TREE_SPEED: Final = 0.92
"""Bandwidth of trees over that of rings [ratio]. Source: NCCL, src/graph/tuning.cc, ncclTopoTuneModel, read 2026-11-27."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Protocol:
    """What a step waits, over a ring's of the protocol for large parts in the same place, and its bandwidth [ratios]."""

    ring_inside: float
    ring_between: float
    tree_inside: float
    tree_between: float
    speed: float


_SIMPLE: Final = _Protocol(1.0, 1.0, 4.0 / 3.4, 14.0 / 14.0, 1.0)
_PROTOCOLS: Final = (
    _SIMPLE,
    _Protocol(1.9 / 3.4, 4.0 / 14.0, 1.25 / 3.4, 8.5 / 14.0, 120 / 128),
    _Protocol(0.6 / 3.4, 2.7 / 14.0, 0.6 / 3.4, 5.0 / 14.0, 1 / 4),
)
"""Simple, LL128 and LL: steps in microseconds over NVLink and over a network, for rings and for trees.

Source: NCCL, src/graph/tuning.cc, hwLatencies (NVLink: rings 0.6, 1.9, 3.4, trees 0.6, 1.25, 4.0; network: rings 2.7, 4.0, 14.0,
trees 5.0, 8.5, 14.0 for LL, LL128, Simple), and ncclTopoTuneModel for the bandwidths, read 2026-11-27.
"""


def fastest_s(moved_s: float, *, rounds: int, group: int, spread: int, hop_s: float, network_hop_s: float) -> float:
    """Return the time of the fastest protocol [s].

    Args:
        moved_s: What the bytes take at full bandwidth [s].
        rounds: How often the tensor goes round: 2 for an all-reduce, 1 for a gather or a scatter [count].
        group: Devices that take part [count].
        spread: Hosts that they are on [count].
        hop_s: A ring's step inside a host, for large parts [s].
        network_hop_s: The same between hosts [s].

    >>> fastest_s(1.0, rounds=1, group=8, spread=1, hop_s=0.0, network_hop_s=0.0)
    1.0
    """
    between = rounds * (spread - 1)
    inside = rounds * (group - 1) - between
    has_trees = rounds == 2 and spread > 1
    best = math.inf
    for protocol in _PROTOCOLS:
        waits = inside * protocol.ring_inside * hop_s + between * protocol.ring_between * network_hop_s
        if protocol is _SIMPLE:
            # A device hands on the first slice of a part while the others arrive: steps hide behind large parts.
            best = min(best, max(moved_s, waits + moved_s / _SLICES))
        else:
            best = min(best, waits + moved_s / protocol.speed)
        if has_trees:
            waits = (group / spread - 1) * protocol.tree_inside * hop_s
            waits += math.log2(spread) * protocol.tree_between * network_hop_s
            best = min(best, rounds * waits + moved_s / (protocol.speed * _TREE_SPEED))
    return best
