"""Proof that a run has left nothing: processes, zombies, listening sockets, descriptors, temporary directories, handlers.

A test's processes are known by a mark in their environment, which they hand on to whatever they start.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil

MARK_VARIABLE = "MESHWRIGHT_TEST_MARK"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_OF_OURS = ("socket:", "pipe:", "anon_inode:[pidfd]", "/memfd:meshwright")


class Watch:
    """What there is before a test, to compare with what there is after it."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._descriptors = _descriptors()
        self._directories = _directories()
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._threads = set(threading.enumerate())

    def processes(self) -> dict[int, str]:
        """Processes that carry the mark, except this one, with their command lines."""
        wanted = f"{MARK_VARIABLE}={self.mark}".encode()
        found = {}
        for pid in psutil.pids():
            try:
                if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def assert_nothing_left(self, within_s: float = 2.0) -> float:
        """Fail unless all is gone in time; return how long it took [s]."""
        start = time.monotonic()
        while (left := self._left()) and time.monotonic() - start < within_s:
            threading.Event().wait(0.01)
        assert not left, f"left behind {within_s} s after the end: {left}"
        return time.monotonic() - start

    def _left(self) -> dict[str, object]:
        found: dict[str, object] = {
            "processes": self.processes(),
            "zombies": [child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE],
            "descriptors": sorted(_descriptors() - self._descriptors),
            "directories": sorted(_directories() - self._directories),
            "handlers": [n for n, handler in self._handlers.items() if signal.getsignal(n) is not handler],
            "threads": [t.name for t in set(threading.enumerate()) - self._threads if not t.daemon],
        }
        return {name: what for name, what in found.items() if what}


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Addresses that these processes listen on, over TCP."""
    found = []
    for pid in pids:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.append((connection.laddr.ip, connection.laddr.port))
    return found


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(_OF_OURS):
            found.add(f"{name} {target}")
    return found


def _directories() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("meshwright")}
