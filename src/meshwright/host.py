"""Limits of this process on its host: cores and memory by affinity, control groups (v1 and v2) and the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import platform
import re
import resource
import sys
from pathlib import Path

__all__: list[str] = []

_ROOT = Path("/sys/fs/cgroup")
# A v1 group without a limit shows the largest multiple of the page size; anything near it is "none".
_NO_LIMIT_BYTES = 1 << 60


def usable_cores() -> int:
    """Return the number of cores that this process may keep busy, at least 1.

    The smaller of the affinity mask and the control group's quota, rounded up.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota + 0.999)))


def _cpu_quota() -> float | None:
    for directory in _group_directories("cpu"):
        words = _read(directory / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            return int(words[0]) / int(words[1])
        quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            return int(quota) / int(period)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The control group that limits a process's memory."""

    directory: str
    limit_bytes: int
    """0 where there is none [bytes]."""

    def num_oom_kills(self) -> int:
        """Return the kernel's out-of-memory kills in this group; -1 where they cannot be read."""
        directory = Path(self.directory)
        for name in ("memory.events", "memory.oom_control"):
            for line in _read(directory / name).splitlines():
                words = line.split()
                if len(words) == 2 and words[0] == "oom_kill":
                    return int(words[1])
        return -1


def memory_group() -> MemoryGroup | None:
    """Return the control group of this process that sets the lowest memory limit, or the nearest one without a limit."""
    found: MemoryGroup | None = None
    for directory in _group_directories("memory"):
        text = _read(directory / "memory.max") or _read(directory / "memory.limit_in_bytes")
        if not text:
            continue
        limit = 0 if text == "max" or int(text) > _NO_LIMIT_BYTES else int(text)
        if found is None or (limit and (not found.limit_bytes or limit < found.limit_bytes)):
            found = MemoryGroup(str(directory), limit)
    return found


def _group_directories(controller: str) -> list[Path]:
    """Return the directories of this process's group and of its parents, nearest first, v1's before v2's."""
    directories: list[Path] = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controllers if controllers else _ROOT
        if not root.is_dir():
            root = _ROOT / controller
        relative = Path(path.lstrip("/"))
        nearest = [root / relative, *(root / parent for parent in relative.parents)]
        directories += [directory for directory in nearest if directory.is_dir()] or [root]
    return directories


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def boot_id() -> str:
    """Return what is the same for two processes only if one kernel has run both since it started; "" where it is not known."""
    return _read(Path("/proc/sys/kernel/random/boot_id"))


def process_numbers_place() -> str:
    """Return what is equal for processes that know each other by number: boot and name space; "" where that is not known."""
    with contextlib.suppress(OSError):
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if (boot := boot_id()) else ""
    return ""


def host_memory_bytes() -> int:
    """Return the memory of this host, or what the control group leaves of it [bytes]."""
    import psutil

    total = int(psutil.virtual_memory().total)
    group = memory_group()
    return min(total, group.limit_bytes) if group is not None and group.limit_bytes else total


def resident_bytes() -> int:
    """Return the memory that this process holds in RAM [bytes]; 0 where the system does not say."""
    words = _read(Path("/proc/self/statm")).split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0


def is_running(pid: int) -> bool:
    """Tell whether a process of this host has not ended; one that nobody has reaped yet has.

    Args:
        pid: Its number.
    """
    stat = _read(Path(f"/proc/{pid}/stat"))
    if stat:
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    if Path("/proc/self").exists():
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, 0)
        return True
    return False


CACHE_VARIABLE = "MESHWRIGHT_CACHE"
"""Environment variable: where files are kept between runs."""


def private_cache_directory() -> Path:
    """Return the folder where files are kept between runs, which must belong to this user alone: what is in it is trusted.

    Raises:
        OSError: It cannot be made, or others can write into it.
    """
    base = os.environ.get(CACHE_VARIABLE) or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "meshwright"
    )
    directory = Path(base)
    if base.startswith("~"):
        raise FileNotFoundError(errno.ENOENT, "the user has no home directory", base)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    is_planted = directory.is_symlink() and directory.lstat().st_uid not in (os.getuid(), 0)
    if is_planted or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "belongs to, or can be written by, another user", str(directory))
    return directory


def processor_name() -> str:
    """Return the processor's name, as the kernel gives it."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def peak_resident_bytes() -> int:
    """Return the most memory that this process has held in RAM so far [bytes].

    A started process inherits `ru_maxrss` on Linux, so a rank's would be at least its launching process's; VmHWM starts anew
    with the program.
    """
    found = re.search(r"^VmHWM:\s+(\d+) kB", _read(Path("/proc/self/status")), re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
