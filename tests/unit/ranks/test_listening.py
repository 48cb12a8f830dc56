"""Rank 0 listens where the ranks were told to look for it, and on all addresses only where that is not known."""

from __future__ import annotations

import errno
import socket

import pytest

from meshwright.errors import ConfigError
from meshwright.ranks import listening
from meshwright.ranks.listening import listen


@pytest.mark.parametrize(
    ("host", "one_host", "expected"),
    [
        ("10.0.0.7", True, "127.0.0.1"),
        ("127.0.0.1", False, ""),  # what an operator tells rank 0 of itself
        ("localhost", False, ""),
        ("192.0.2.1", False, ""),  # no host has it: an address that is translated
        ("a-service", False, ""),
    ],
)
def test_addresses(host: str, one_host: bool, expected: str) -> None:
    with listen(host, 0, one_host=one_host) as listener:
        assert listener.getsockname()[0] in ({expected} if expected else {"::", "0.0.0.0"})


def test_this_hosts_own_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; chooses the address of the way out
        except OSError:
            pytest.skip("this host has loopback alone")
        own = probe.getsockname()[0]
    with listen(own, 0, one_host=False) as listener:
        assert listener.getsockname()[0] == own


def test_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return whole(family, address, port)

    whole = listening._bound
    monkeypatch.setattr(listening, "_bound", bound)
    with listen("a-service", 0, one_host=False) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0, one_host=True) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on port {port} of here") as caught:
            listen("here", port, one_host=True)
    assert "export MASTER_PORT=" in str(caught.value.fix)
