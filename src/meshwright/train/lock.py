"""Lock of a run's folder: one process at a time writes there, and the file names it.

The kernel's `flock` decides, which ends with its process, however that ends. The file also says who holds it: host, process, when
that was started and since which boot, so that a number which another process has by now proves nothing. Where a file system gives
the lock to everybody, the living process that the file names still has the folder, as long as it is on this host.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import time
from pathlib import Path

import psutil

from meshwright.checkpoint.durable import open_own_file
from meshwright.errors import DirectoryInUseError
from meshwright.host import boot_id

__all__: list[str] = []

_MOST_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, told from every other one of this and of other hosts, now and later."""

    host: str
    pid: int
    started: str
    """When it was started, as this boot counts it."""
    boot: str
    """The boot of its kernel; empty where that has no name."""
    since: str = ""
    """When it took the lock, for people."""

    @classmethod
    def this_process(cls) -> Owner:
        """Return this process."""
        pid = os.getpid()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(host=platform.node(), pid=pid, started=_start_of(pid) or "", boot=boot_id(), since=since)

    @classmethod
    def read(cls, text: str) -> Owner | None:
        """Return the owner that a lock file names; None where it names none."""
        try:
            found = json.loads(text)
            owner = cls(**found)
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (owner.host, owner.started, owner.boot, owner.since)
        return owner if type(owner.pid) is int and all(isinstance(one, str) for one in texts) else None

    def to_line(self) -> str:
        """Return the lock file's contents."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @property
    def is_alive_beside_us(self) -> bool:
        """Whether it is another process, of this boot, that runs now."""
        is_here = bool(self.boot) and self.boot == boot_id() and self.pid > 0
        return is_here and self.pid != os.getpid() and _start_of(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" since {self.since}" if self.since else "")


class FolderLock:
    """The lock of a folder, held until it is closed or the process ends. Ranks do not inherit it.

    Args:
        path: The lock file; it is made where it is missing, and stays.
        folder: What it guards, for messages.

    Raises:
        DirectoryInUseError: Another process has it.
        OSError: It cannot be made or written.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        descriptor = open_own_file(path, os.O_RDWR)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except BlockingIOError:
                is_free = False
            owner = Owner.read(os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace"))
            if not is_free or (owner is not None and owner.is_alive_beside_us):
                raise DirectoryInUseError(
                    f"another run, {owner or 'of an unknown process'}, is using {folder} (rule: one run for each folder)",
                    fix="wait for it, or give this run another name: --set train.name=NAME",
                )
            line = Owner.this_process().to_line().encode()
            os.pwrite(descriptor, line, 0)
            os.ftruncate(descriptor, len(line))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Let another process have the folder."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.ftruncate(descriptor, 0)  # this process may live on
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # and so may those that it forked, which have the descriptor too
            finally:
                os.close(descriptor)


def _start_of(pid: int) -> str | None:
    """Return when a process was started, the same at each call; None where there is none."""
    try:
        # The 22nd field, in ticks since the boot: psutil's time moves with the clock.
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19].decode()
    except (OSError, IndexError):
        pass
    if os.path.isdir("/proc/self"):
        return None
    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
