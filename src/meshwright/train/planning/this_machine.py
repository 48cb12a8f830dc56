"""Clusters of this host: measured once for each way to share its cores, and kept between runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec, load_cluster
from meshwright.host import private_cache_directory, processor_name, usable_cores
from meshwright.kept_files import keep_file, read_kept_file
from meshwright.measure.host_pace import has_other_pace
from meshwright.measure.probe import probe_cluster
from meshwright.measure.probe_cores import is_busy, is_disturbed
from meshwright.ranks.environment import choose_transport
from meshwright.train.config.checks import visible_devices

__all__: list[str] = []

CLUSTER_VARIABLE: Final = "MESHWRIGHT_CLUSTER"
"""Environment variable: a cluster to predict for, as `load_cluster` takes it, in place of this host; "none" predicts nothing."""

_FORMAT: Final = 8
"""Of what a probe measures: kept files of another one are not used."""


def is_switched_off() -> bool:
    """Tell whether nothing is to be predicted."""
    return os.environ.get(CLUSTER_VARIABLE) == "none"


def is_named() -> bool:
    """Tell whether a cluster is named in this host's place, whose pace now says nothing of it."""
    return bool(os.environ.get(CLUSTER_VARIABLE))


def this_machine(
    num_ranks: int,
    threads: int,
    *,
    measure: bool = True,
    on_stage: Callable[[str, int, int], None] | None = None,
) -> ClusterSpec | None:
    """Return this host as that many ranks see it, all at once.

    Args:
        num_ranks: Ranks, one for each device [count].
        threads: Threads that a CPU rank computes with [count].
        measure: Whether to measure what is not kept; it takes some ten seconds.
        on_stage: Told of each measurement; see `probe_cluster`.

    Returns:
        The cluster; None where nothing is kept and nothing may be measured, or nothing is to be predicted.

    Raises:
        ConfigError: MESHWRIGHT_CLUSTER names no cluster.
    """
    if is_switched_off():
        return None
    named = os.environ.get(CLUSTER_VARIABLE)
    if named:
        return load_cluster(named)
    kept = kept_file("machine", num_ranks, threads)
    if kept is not None:
        # A file that was cut, changed or planted, or is of a later version: measured anew.
        with contextlib.suppress(ConfigError, OSError, ValueError):
            cluster = ClusterSpec.from_json(read_kept_file(kept).decode())
            if not (measure and is_outdated(cluster)):
                return cluster
    return measure_this_machine(num_ranks, threads, on_stage=on_stage) if measure else None


def measure_this_machine(
    num_ranks: int, threads: int, *, on_stage: Callable[[str, int, int], None] | None = None
) -> ClusterSpec:
    """Measure this host as that many ranks see it, whatever is kept, and keep that; arguments as of `this_machine`."""
    cluster = probe_cluster(num_ranks, threads_per_device=threads, on_stage=on_stage)
    keep_cluster(cluster, num_ranks, threads)
    return cluster


def is_outdated(cluster: ClusterSpec) -> bool:
    """Tell whether a kept cluster no longer holds, and can be measured: no other programs run now; it takes 0.2 s and more.

    It was measured beside programs that no longer run, or this host has become slower or faster.
    """
    return not is_named() and (is_disturbed(cluster) or has_other_pace(cluster)) and not is_busy()


def keep_cluster(cluster: ClusterSpec, num_ranks: int, threads: int) -> None:
    """Keep a cluster for later runs on this host; where that cannot be, they measure anew."""
    path = kept_file("machine", num_ranks, threads)
    if path is None:
        return
    with contextlib.suppress(OSError):
        keep_file(path, cluster.to_json(indent=2).encode())


def keep_for_runs(cluster: ClusterSpec) -> None:
    """Keep what was measured with an equal share of the cores for each rank, as `train` starts them."""
    keep_cluster(cluster, cluster.num_devices, max(1, usable_cores() // cluster.num_devices))


def kept_file(kind: str, *facts: object) -> Path | None:
    """Return where something that holds for this host alone is kept; None where nothing can be.

    Args:
        kind: What it is, the first word of the file's name.
        facts: What it also depends on, each as its `repr` tells it.
    """
    facts = (
        _FORMAT,
        os.uname().nodename,
        processor_name(),
        usable_cores(),
        visible_devices(),
        metadata.version("torch"),
        choose_transport(os.environ),
        *facts,
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:20]
    try:
        return private_cache_directory() / f"{kind}-{digest}.json"
    except OSError:
        return None
