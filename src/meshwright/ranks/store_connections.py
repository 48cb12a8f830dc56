"""Connections of this process to a job's store, which give up where the store's host cannot be reached or does not answer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

__all__: list[str] = []

_LOOK_S = 0.25
_MOST_BETWEEN_LOOKS_S = 1.0
"""How much silence one look counts at most: this process may have been stopped itself meanwhile [s]."""


def limit_connections(host: str, port: int, patience_s: float) -> int:
    """Have this process's connections to a store fail where nothing that was sent has arrived for so long.

    TCP itself tries for a quarter of an hour, and the store's client, which waits for an answer, with it.

    Args:
        host: The store's host.
        port: Its port.
        patience_s: How long [s].

    Returns:
        How many connections there were [count].
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return 0
    return len([_set_timeout(number, patience_s) for number in _connections(_addresses(host, port), port)])


class StoreGuard:
    """Shuts this process's connections to a store down where that has answered nothing for too long.

    Where the store's process is stopped, or its network drops everything, the connections stay, and an operation on the store
    has no limit of its own: whoever asks would wait for ever. A connection that was shut down raises at once, and stays so:
    an answer that comes late would be taken for that to a later question.

    Args:
        host: The store's host.
        port: Its port.
        limit_s: How long it may answer nothing [s].
        answered_at: Returns when it has answered last, `time.monotonic()` [s].
    """

    def __init__(self, host: str, port: int, limit_s: float, answered_at: Callable[[], float]) -> None:
        self._addresses, self._port = _addresses(host, port), port  # now: a name may not be found any more by then
        self._limit_s = limit_s
        self._answered_at = answered_at
        self.has_shut = False
        """Whether it has shut them down."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-store-guard", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End; it may be called again."""
        self._is_over.set()

    def _run(self) -> None:
        last, silent_s, looked_at = self._answered_at(), 0.0, time.monotonic()
        while not self._is_over.wait(_LOOK_S):
            now, answered_at = time.monotonic(), self._answered_at()
            silent_s = silent_s + min(now - looked_at, _MOST_BETWEEN_LOOKS_S) if answered_at == last else 0.0
            last, looked_at = answered_at, now
            if silent_s > self._limit_s:
                self.has_shut = True
                for number in _connections(self._addresses, self._port):
                    _shut_down(number)
                return


def _addresses(host: str, port: int) -> set[Any]:
    with contextlib.suppress(OSError):
        return {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return set()


def _connections(addresses: set[Any], port: int) -> list[int]:
    """Return the descriptors of this process's connections to a port of one of these addresses."""
    with contextlib.suppress(OSError):
        return [number for number in map(int, os.listdir("/proc/self/fd")) if _leads_to(number, addresses, port)]
    return []


def _leads_to(number: int, addresses: set[Any], port: int) -> bool:
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            with socket.socket(fileno=os.dup(number)) as twin:
                peer = twin.getpeername()
                return isinstance(peer, tuple) and peer[1] == port and peer[0].removeprefix("::ffff:") in addresses
    return False


def _set_timeout(number: int, patience_s: float) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as twin:
        twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience_s))


def _shut_down(number: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as twin:
        twin.shutdown(socket.SHUT_RDWR)
