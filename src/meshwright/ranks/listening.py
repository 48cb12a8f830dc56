"""Addresses of a job: the socket on which rank 0 listens for the others' first words, and the interface towards it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from meshwright.errors import ConfigError

__all__: list[str] = []


def listen(host: str, port: int, *, one_host: bool) -> socket.socket:
    """Return a listening socket for the store, bound here so that a taken port is reported at once.

    On one host it hears that host alone. Else it hears the address that the ranks were given, where that is a number and this
    host's. A name may mean other addresses to other hosts, and loopback to rank 0 alone (Kubernetes' operator sets it so), and
    an address that is translated on its way is none of this host's: then it hears all.

    Args:
        host: The master's address, as the ranks were given it.
        port: Its port.
        one_host: Whether all ranks are on this host.

    Raises:
        ConfigError: Another process has the port.
    """
    own = "127.0.0.1" if one_host else _address_in(host)
    try:
        if own:
            try:
                return _bound(socket.AF_INET6 if ":" in own else socket.AF_INET, own, port)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        return _bound_to_all(port)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen on port {port} of {host} (MASTER_PORT): {error.strerror}{_holder(port)}",
            fix=f"choose another port, for example: export MASTER_PORT={_free_port()}",
        ) from error


def interface_towards(host: str, port: int) -> str | None:
    """Return the name of this host's interface from which packets to a master leave; None where it is not known.

    gloo takes the interface that this host's own name leads to, which on many systems is loopback, out of other hosts' reach.

    Args:
        host: The master's address, as the ranks were given it.
        port: Its port.
    """
    import psutil

    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                own = probe.getsockname()[0]
            if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                return next(
                    (name for name, its in psutil.net_if_addrs().items() if any(a.address == own for a in its)), None
                )
    return None


def _address_in(host: str) -> str:
    """Return the address that a master's name is, where it is one that other hosts can reach; else ""."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if not (address.is_loopback or address.is_unspecified or address.is_link_local):
            return host
    return ""


def _bound_to_all(port: int) -> socket.socket:
    if socket.has_ipv6:  # as Python was built; the kernel may have been started without it
        try:
            return _bound(socket.AF_INET6, "", port)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return _bound(socket.AF_INET, "", port)


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not address:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def _holder(port: int) -> str:
    """Return ", held by process 123 (python train.py)", or "" where that is not visible."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if is_it and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())[:80]
                return f", held by process {connection.pid} ({command})"
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
