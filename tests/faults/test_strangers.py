"""F18: a stranger on the same machine connects to the ranks' ports and sends junk."""

from __future__ import annotations

import random
import socket
from typing import Any

import psutil
import pytest
from tests.faults import leaks
from tests.faults.jobs import rank_jobs as jobs

from meshwright.ranks.launch import RankGroup

STEPS = 44


def outside_interface() -> str:
    """Name of an interface that leads out of the machine; loopback's where there is none."""
    found = psutil.net_if_addrs()
    return next((name for name in sorted(found) if not name.startswith("lo")), "lo")


def test_a_stranger_changes_nothing_and_nothing_listens_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_TRANSPORT", "gloo")  # shared memory opens no port at all
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", outside_interface())  # of a job on several hosts; not ours
    with RankGroup(2) as group:
        undisturbed = group.submit(jobs.train, STEPS, True)
    assert undisturbed[0] == undisturbed[1]

    source = random.Random(18)
    open_ends: list[socket.socket] = []
    addresses: set[tuple[str, int]] = set()

    def disturb(rank: int, event: dict[str, Any]) -> None:
        addresses.update(leaks.listening(group.pids))
        for address in sorted(addresses):
            stranger = socket.create_connection(address, timeout=1)
            junk = [b"GET / HTTP/1.1\r\n\r\n", source.randbytes(4096), b"", b"\xff" * 64]
            stranger.sendall(junk[event["step"] % 4])
            if event["step"] % 2:
                open_ends.append(stranger)  # half open for the rest of the run
            else:
                stranger.close()

    with RankGroup(2, on_event=disturb) as group:
        disturbed = group.submit(jobs.train, STEPS, True)
    for end in open_ends:
        end.close()
    assert addresses, "gloo listens on no port: the test has lost its object"
    assert {ip for ip, _ in addresses} <= {"127.0.0.1", "::1"}
    assert len(open_ends) > 20
    assert disturbed == undisturbed


def test_without_distributed_work_nothing_listens_either(watch: leaks.Watch) -> None:
    with RankGroup(1) as group:
        assert group.submit(jobs.identity, 1) == [1]
        assert {ip for ip, _ in leaks.listening(list(watch.processes()))} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"])
def test_another_launchers_variables_do_not_reach_the_ranks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from meshwright.ranks.processes import rank_environment

    monkeypatch.setenv(name, "1")
    assert name not in rank_environment("0" * 32, 1, None)
