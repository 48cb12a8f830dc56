"""Kill a rank, or what ranks are forked from, at an instant counted from its birth."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from tests.faults import leaks


def find(watch: leaks.Watch, is_it: Callable[[str], bool], patience_s: float = 30.0) -> int | None:
    """Return the id of a process as soon as it exists, by its command line."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        for pid, command in watch.processes().items():
            if is_it(command.strip()):
                return pid
    return None


def is_rank(rank: int, num: int) -> Callable[[str], bool]:
    return lambda command: command.endswith(f" {rank}/{num}")


def is_template(command: str) -> bool:
    return "meshwright.ranks.fork_server" in command


class Killer(threading.Thread):
    """Kills a process a given time after it was born."""

    def __init__(self, watch: leaks.Watch, is_it: Callable[[str], bool], delay_s: float) -> None:
        super().__init__(daemon=True)
        self._watch, self._is_it, self._delay_s = watch, is_it, delay_s
        self.killed_at = float("nan")

    def run(self) -> None:
        pid = find(self._watch, self._is_it)
        if pid is not None:
            threading.Event().wait(self._delay_s)
            self.killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
