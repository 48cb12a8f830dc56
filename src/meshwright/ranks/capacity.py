"""Capacity of this host for ranks: refused by name with the number that is too small, before any process is started."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from pathlib import Path
from typing import Final

from meshwright.errors import ConfigError
from meshwright.host import usable_cores

__all__: list[str] = []

RANKS_PER_CORE: Final = 32
"""Ranks that share a core at most; more take minutes to find each other, and gigabytes each for torch's own memory [count]."""
_OWN_DESCRIPTORS: Final = 24
"""Descriptors of the launching process beside those for each rank: board, store, reaper, template, signals, selector [count]."""
_DESCRIPTORS_PER_RANK: Final = 4
"""Two ends of its channel, its stack file, its process descriptor [count]."""
_THREADS_PER_RANK: Final = 4
"""Threads of a rank beside its main one and those that compute: channel, watchdog, two of the transport [count]."""


def check_devices(num_devices: int, plan: str = "") -> None:
    """Check that this host has cores for that many devices that are CPU ranks or threads.

    Args:
        num_devices: Ranks, or devices of the one process [count].
        plan: The plan's line, for the message.

    Raises:
        ConfigError: There are too many.
    """
    cores = usable_cores()
    most = RANKS_PER_CORE * cores
    if num_devices > most:
        what = f"the plan '{plan}' has {num_devices} ranks" if plan else f"{num_devices} ranks"
        raise ConfigError(
            f"{what}, this machine has {cores} usable cores (rule: at most {RANKS_PER_CORE} ranks for each core, {most} here)",
            fix=f"at most {most} devices here, or more machines: torchrun --nnodes",
        )


def check_launch(num_ranks: int) -> None:
    """Check that this process may start that many ranks: cores, descriptors and processes.

    Raises:
        ConfigError: A limit is too low; the message has the number that there is and the one that is needed.
    """
    check_devices(num_ranks)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = _open_descriptors()
    needed = held + _OWN_DESCRIPTORS + _DESCRIPTORS_PER_RANK * num_ranks
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise ConfigError(
            f"{num_ranks} ranks need {needed} open files, {held} of them open now; the limit of this process is {limit} "
            f"(rule: {_OWN_DESCRIPTORS}, and {_DESCRIPTORS_PER_RANK} for each rank)",
            fix=f"ulimit -n {max(1024, needed)}",
        )
    room = _room_in_group()
    if room is not None and (wanted := num_ranks * (1 + _THREADS_PER_RANK)) > room[0]:
        raise ConfigError(
            f"{num_ranks} ranks need {wanted} processes and threads, the control group of this process has room for "
            f"{room[0]} (rule: {1 + _THREADS_PER_RANK} for each rank)",
            fix=f"raise {room[1]}, or use fewer ranks",
        )


def explain_limit(error: OSError, num_ranks: int) -> ConfigError | None:
    """Return what a failure to start ranks means where a limit of the system is behind it, else None.

    Args:
        error: The failure.
        num_ranks: The ranks that were to be started [count].
    """
    doing = f"{num_ranks} ranks could not be started: {error.strerror}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = (
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] if error.errno == errno.EMFILE else "the system's file-max"
        )
        return ConfigError(f"{doing}; the limit of open files is {limit}", fix="ulimit -n 4096, or fewer ranks")
    if error.errno == errno.EAGAIN:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0] if hasattr(resource, "RLIMIT_NPROC") else -1
        text = "not set" if limit == resource.RLIM_INFINITY else str(limit)
        room = _room_in_group()
        group = "" if room is None else f", its control group has room for {room[0]} more ({room[1]})"
        return ConfigError(
            f"{doing}; this user's limit of processes and threads is {text}{group}",
            fix="ulimit -u 65536, or fewer ranks",
        )
    if error.errno == errno.ENOMEM:
        return ConfigError(f"{doing}; there is no memory for another process", fix="fewer ranks")
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return ConfigError(
            f"{doing}; the system forbids a call that starting a process needs (fork, setsid, socketpair, or execve of "
            f"{sys.executable})",
            fix="allow these calls in the container's seccomp profile",
        )
    return None


def _open_descriptors() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd")) - 1
    return 3


def _room_in_group() -> tuple[int, str] | None:
    """Return how many processes this one's control group may still start, and the file that says so."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
        most = (folder / "pids.max").read_text().strip()
        if most != "max":
            return int(most) - int((folder / "pids.current").read_text()), str(folder / "pids.max")
    return None
