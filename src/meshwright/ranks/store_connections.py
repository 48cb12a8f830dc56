"""Connections of this process to a job's store, which give up where the store's host cannot be reached."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

__all__: list[str] = []


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
    with contextlib.suppress(OSError):
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        found = [number for number in map(int, os.listdir("/proc/self/fd")) if _leads_to(number, addresses, port)]
        return len([_set_timeout(number, patience_s) for number in found])
    return 0


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
