"""Pace of this host: how fast it copies memory now, beside when it was measured, and so whether what is kept still holds.

A virtual machine shares caches and memory with others, which its own counters do not show: the same host computed the same
step 1.6 to 2 times as slowly a day later, with nothing else running in it.
"""

from __future__ import annotations

import functools
import time
from typing import Final

from meshwright.hardware.cluster import HOST_DEVICE, ClusterSpec

__all__: list[str] = []

_BLOCK_BYTES: Final = 32 * 2**20
"""What is copied at once: more than a core's caches hold [bytes]."""

_COPIES: Final = 15
"""Copies of which the fastest counts: programs that take this core for a moment do not count [count]."""

_TURN: Final = 20_000
"""Additions of the fixed piece of work [count]."""

_TURNS: Final = 5
"""Pieces of which the fastest counts [count]."""

_MOST_APART: Final = 1.5
"""Ratio of the two rates, either way, from which on what was measured holds no longer; a quiet host's differ by up to 1.4."""


def copy_rate() -> float:
    """Return what one process copies of its memory; it takes 0.1 to 0.4 s [bytes/s]."""
    source, target = bytearray(_BLOCK_BYTES), memoryview(bytearray(_BLOCK_BYTES))
    best = float("inf")
    for _ in range(_COPIES):
        start = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - start)
    return _BLOCK_BYTES / best


def turn_s() -> float:
    """Return what a fixed piece of the interpreter's work takes now, in this process; some 10 ms in all [s]."""
    best = float("inf")
    for _ in range(_TURNS):
        start, total = time.perf_counter(), 0
        for number in range(_TURN):
            total += number
        best = min(best, time.perf_counter() - start)
    return best


@functools.cache
def _rate_now() -> float:
    return copy_rate()


def pace(cluster: ClusterSpec) -> float:
    """Return how fast this host copies memory now over when a cluster was measured on it; 1 where that is not known [ratio]."""
    if not cluster.copied_bytes_per_s or cluster.device.name != HOST_DEVICE:
        return 1.0
    return _rate_now() / cluster.copied_bytes_per_s


def has_other_pace(cluster: ClusterSpec) -> bool:
    """Tell whether this host is so much slower or faster than when it was measured that predictions would mislead."""
    return not 1 / _MOST_APART <= pace(cluster) <= _MOST_APART


def pace_text(cluster: ClusterSpec) -> str:
    """Return what a user is told of a host that has another pace than when it was measured."""
    now = pace(cluster)
    wrong = "short" if now < 1 else "long"
    return (
        f"this machine copies memory at {now:.2f} times the rate of when it was measured, so predicted times may be too {wrong};"
        " `meshwright probe` measures it anew"
    )
