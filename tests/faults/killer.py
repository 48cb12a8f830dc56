"""Kill a rank at an instant counted from its birth: the interpreter's start, the import of torch, the rendezvous, the run."""

from __future__ import annotations

import os
import signal
import threading
import time

from tests.faults import leaks


def find_rank(watch: leaks.Watch, rank: int, num: int, patience_s: float = 30.0) -> int | None:
    """Return the process id of a rank as soon as it exists."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        for pid, command in watch.processes().items():
            if command.strip().endswith(f" {rank}/{num}"):
                return pid
    return None


class Killer(threading.Thread):
    """Kills a rank a given time after it was born."""

    def __init__(self, watch: leaks.Watch, rank: int, num: int, delay_s: float) -> None:
        super().__init__(daemon=True)
        self._watch, self._rank, self._num, self._delay_s = watch, rank, num, delay_s
        self.killed_at = float("nan")

    def run(self) -> None:
        pid = find_rank(self._watch, self._rank, self._num)
        if pid is not None:
            threading.Event().wait(self._delay_s)
            self.killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
