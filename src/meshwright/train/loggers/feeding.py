"""Thread that feeds one logger: a library that waits for its server must not make the run wait, nor end it."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from meshwright.texts import clean

__all__: list[str] = []

MOST_WAITING: Final = 20_000
"""Calls that wait for a logger; one that is further behind gets nothing more [count]."""
END_S: Final = 60.0
"""How long the end of a run waits for a logger [s]."""
HURRY_S: Final = 1.0
"""How long it waits where the process is asked to end [s]."""
_LOOK_S: Final = 0.1

Call = Callable[[], object]


class Feeder:
    """Calls that are made one after the other, beside the run. A call that fails is told once, and is the last one.

    Args:
        name: The logger, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.Queue[Call | None] = queue.Queue(MOST_WAITING)
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def add(self, call: Call) -> None:
        """Make a call after those before; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"meshwright-logger-{self._name}", daemon=True)
            self._thread.start()
        try:
            if not self._has_failed:
                self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"it is {MOST_WAITING} calls behind")

    def close(self, *, is_hurried: Callable[[], bool]) -> None:
        """Wait until all calls are made, a second alone where the process is asked to end.

        Args:
            is_hurried: Whether the process is asked to end.
        """
        if self._thread is None or self._has_failed:
            return
        began = time.monotonic()

        def may_wait() -> bool:
            waited_s = time.monotonic() - began
            return waited_s < END_S and (waited_s < HURRY_S or not is_hurried())

        is_told = False
        while not self._has_failed and self._thread.is_alive() and may_wait():
            if is_told:
                self._thread.join(_LOOK_S)
                continue
            with contextlib.suppress(queue.Full):
                self._calls.put(None, timeout=_LOOK_S)
                is_told = True
        if self._thread.is_alive():
            self._warn("it has not ended, and is left to itself")

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._has_failed:
            try:
                call()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a library of others' must not end a training
                self._fail(f"{type(error).__name__}: {error}"[:500])
                return

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._warn(why)

    def _warn(self, why: str) -> None:
        sys.stderr.write(f"warning: the logger '{self._name}' failed and gets nothing more: {clean(why)}\n")
