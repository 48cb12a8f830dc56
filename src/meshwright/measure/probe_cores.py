"""Cores during a probe: how much of them other programs took, and so how far its numbers can be trusted."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from meshwright.hardware.cluster import ClusterSpec

__all__: list[str] = []

_MOST_TAKEN: Final = 0.1
"""Share of the cores from which on a probe counts as disturbed: step times would be predicted as much too long."""

_LOOK_S: Final = 0.2
"""How long the cores are watched for what runs on them now [s]."""


@dataclasses.dataclass(frozen=True, slots=True)
class CoreUse:
    """Cores that a rank may use, over a time."""

    seconds: float
    """The time [s]."""
    cores: float
    """Cores that the rank may use [count]."""
    busy_s: float
    """What all programs and other virtual machines took of them [core seconds]."""
    own_s: float
    """What this rank took [core seconds]."""
    threads: int
    """Threads that the rank computes with [count]."""


def start_watch(threads: int) -> Callable[[], CoreUse]:
    """Begin to watch the cores of this process; the call that is returned tells of the time since then.

    Args:
        threads: Threads that this rank computes with [count].
    """
    start, busy, own = time.perf_counter(), _busy_s(), time.process_time()

    def use() -> CoreUse:
        seconds = time.perf_counter() - start
        return CoreUse(seconds, float(len(_cores())), _busy_s() - busy, time.process_time() - own, threads)

    return use


def share_of_others(ranks: Sequence[CoreUse]) -> float:
    """Return what other programs took of the cores that these ranks could have used [share, 0 to 1].

    Cores that ranks leave idle may be taken by anybody: only what goes beyond counts. Ranks have the same cores.
    """
    cores = max(rank.cores for rank in ranks)
    others = max(
        0.0, max(rank.busy_s / rank.seconds for rank in ranks) - sum(rank.own_s / rank.seconds for rank in ranks)
    )
    wanted = min(cores, float(sum(rank.threads for rank in ranks)))
    return min(1.0, max(0.0, others + wanted - cores) / wanted)


def is_disturbed(cluster: ClusterSpec) -> bool:
    """Tell whether a cluster was measured beside programs that took much of its cores."""
    return cluster.taken_by_others > _MOST_TAKEN


def is_busy() -> bool:
    """Tell whether programs keep much of this process's cores busy now; it takes 0.2 s."""
    use = start_watch(0)
    time.sleep(_LOOK_S)
    now = use()
    return now.busy_s - now.own_s > _MOST_TAKEN * now.cores * now.seconds


def disturbed_text(cluster: ClusterSpec) -> str:
    """Return what a user is told of a cluster that was measured beside other programs."""
    return (
        f"this machine was measured while other programs took {cluster.taken_by_others:.0%} of its cores, so predictions"
        " may be too long; `meshwright probe` on a quiet machine measures it anew"
    )


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _busy_s() -> float:
    """Return what all programs, and machines beside this one, took of this process's cores since the start [core seconds]."""
    times = psutil.cpu_times(percpu=True)
    mine = [times[core] for core in _cores() if core < len(times)]
    # guest time is in user time already; steal is what the processor computed for another machine
    return sum(
        one.user + one.system + sum(getattr(one, n, 0.0) for n in ("nice", "irq", "softirq", "steal")) for one in mine
    )
