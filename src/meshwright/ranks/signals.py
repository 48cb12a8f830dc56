"""Stop signals, which are recorded and acted on later, and the restoration of the caller's own handlers."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from types import FrameType
from typing import Any

__all__: list[str] = []

STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP inside its context. Only the main thread can; elsewhere it does nothing.

    A signal that the process ignores (nohup) stays ignored.

    Args:
        raise_second: Whether the handler raises KeyboardInterrupt at a second SIGINT, instead of only recording it.
    """

    def __init__(self, *, raise_second: bool = False) -> None:
        self._raise_second = raise_second
        self._previous: dict[int, Any] = {}
        self._depth = 0
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self.first: str | None = None
        """Name of the first stop signal, for example "SIGTERM"."""
        self.interrupted_again = False
        """Whether SIGINT came after the first stop signal."""

    def __enter__(self) -> StopSignals:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                previous = signal.getsignal(number)
                # None: installed by C code, which could not be restored.
                if previous is not None and previous is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous.clear()

    def wake_socket(self) -> socket.socket:
        """Return a socket that becomes readable when a signal is recorded, which wakes a selector."""
        if self._wake is None:
            self._wake = socket.socketpair()
            for end in self._wake:
                end.setblocking(False)
        return self._wake[0]

    def close(self) -> None:
        """Close the wake socket."""
        if self._wake is not None:
            for end in self._wake:
                end.close()
            self._wake = None

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        if self.first is None:
            self.first = signal.Signals(number).name
        elif number == signal.SIGINT:
            self.interrupted_again = True
            if self._raise_second:
                raise KeyboardInterrupt
        if self._wake is not None:
            with contextlib.suppress(OSError):
                self._wake[1].send(b"!")
