"""Which ranks of a job an exchange lacks, from what all of them tell the store."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import queue
import socket
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from meshwright.ranks import joined_watch, store_connections
from meshwright.ranks.joined_watch import HEARD_KEY, HOST_KEY, JoinedWatch
from meshwright.ranks.listening import interface_towards
from meshwright.ranks.store_connections import StoreGuard, limit_connections
from meshwright.spec.rank_states import RankActivity, RankStates

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_watch, "_PERIOD_S", 0.02)
    monkeypatch.setattr(joined_watch, "_SILENT_PERIODS", 10.0)


@pytest.fixture
def watches() -> Iterator[list[JoinedWatch]]:
    store: Any = HashStore()
    made = [JoinedWatch(store, rank, 4) for rank in range(4)]
    for rank, watch in enumerate(made):
        store.set(f"{HOST_KEY}/{rank}", f"host{rank // 2}")
        watch.pulse.progress(7, "step")
        watch.start()
    yield made
    for watch in made:
        watch.stop()


def silence(watch: JoinedWatch) -> None:
    """End a watch as a kill does: without a last word."""
    watch._tell()
    watch._is_over.set()
    watch._thread.join()


def test_a_silent_rank_is_missing_before_one_that_works(watches: list[JoinedWatch]) -> None:
    for watch in watches[:2]:
        watch.pulse.enter("all_reduce")
    silence(watches[3])
    missing = watches[0].find_missing()
    assert (missing.ranks, missing.peer) == ((3,), 3)
    lines = missing.text.splitlines()
    assert lines[0].startswith("  rank 1 on host0 waits in all_reduce for ")
    assert lines[1] == "  rank 2 on host1 is in no exchange; step 7, phase step"
    assert "rank 3 on host1 gives no sign of life" in lines[2]


def test_a_rank_that_works_is_missing_where_all_live(watches: list[JoinedWatch]) -> None:
    for watch in (watches[0], watches[1], watches[3]):
        watch.pulse.enter("all_reduce")
    missing = watches[0].find_missing()
    assert (missing.ranks, missing.working) == ((2,), (2,))


def test_ranks_whose_exchange_has_failed_too_are_not_missing(watches: list[JoinedWatch]) -> None:
    # All that wait for one rank reach their limit in the same moment, and wait no more.
    for rank in (0, 1, 3):
        watches[rank].has_given_up = lambda: True
    missing = watches[0].find_missing()
    assert missing.ranks == (2,)
    assert "rank 1 on host0 has waited in an exchange that has failed" in missing.text


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(joined_watch, "end_this_rank", lambda why, patience_s: told.append(f"{why} ({patience_s:g} s)"))
    return told


def test_a_rank_that_others_have_given_up_ends(watches: list[JoinedWatch], ended: list[str]) -> None:
    watches[0].stop("has left, since rank 2 is missing", (2,))
    watches[2]._thread.join(10)
    assert watches[0]._store.check([f"{HEARD_KEY}/2"])
    assert ended == ["another rank has waited for rank 2 in vain, and has left (1 s)"]


@pytest.mark.usefixtures("ended")
def test_whoever_has_left_because_of_a_rank_is_not_missing(watches: list[JoinedWatch]) -> None:
    for watch in watches:
        watch.pulse.enter("all_reduce")
    watches[1].stop("has left, since rank 2 is missing", (2,))
    missing = watches[0].find_missing()
    assert missing.ranks == (2,)
    assert "rank 1 on host0 has left, since rank 2 is missing" in missing.text


def test_nobody_is_missing_where_all_wait(watches: list[JoinedWatch]) -> None:
    for watch in watches:
        watch.pulse.enter("all_reduce")
    assert watches[0].find_missing().ranks == ()


def test_all_ranks_are_told_to_those_who_watch(watches: list[JoinedWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_watch, "_STATES_S", 0.0)
    monkeypatch.setattr(joined_watch, "_SILENT_S", 0.1)
    watches[2].pulse.enter("all_reduce")
    silence(watches[3])
    watches[1].stop()
    looks: queue.SimpleQueue[list[RankActivity]] = queue.SimpleQueue()
    watches[0].on_states = lambda ranks, _: looks.put(list(ranks))
    deadline = time.monotonic() + 20.0
    while "no sign of life" not in (ranks := looks.get(timeout=10))[3].phase:
        assert time.monotonic() < deadline
    assert [(one.phase, one.step, one.host) for one in ranks] == [
        ("step", 7, ""),
        ("has left", 7, ""),
        ("step", 7, "host1"),
        ("step, no sign of life", 7, "host1"),
    ]
    assert (ranks[2].collective, ranks[2].wait_s is not None, ranks[3].wait_s) == ("all_reduce", True, None)
    assert all(one.pid == os.getpid() and one.rss_bytes > 0 for one in ranks)
    assert RankStates.from_json(RankStates(written_at=1.0, limit_s=None, ranks=tuple(ranks)).to_json()).ranks


def test_whoever_was_told_lets_the_guilty_rank_end_first(watches: list[JoinedWatch]) -> None:
    child = subprocess.Popen(["sleep", "60"])
    for watch in watches:
        watch._tell()
    try:
        told = watches[0]._read_all()
        for rank in (1, 3):  # 1 is on this host, 3 is not
            watches[rank].stop()
            words = dataclasses.astuple(dataclasses.replace(told[rank], pid=child.pid))
            watches[rank]._store.set(f"told/{rank}", json.dumps(words))
        began = time.monotonic()
        watches[0].await_end(3, 20.0)
        assert time.monotonic() - began < 10.0
        watches[0].await_end(1, 0.2)
        assert time.monotonic() - began >= 0.2
        child.kill()  # and nobody reaps it before it is waited for
        watches[0].await_end(1, 20.0)
        assert time.monotonic() - began < 10.0
    finally:
        child.kill()
        child.wait(10)


def test_a_store_that_is_gone_is_rank_0s_host() -> None:
    host: Any = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client: Any = TCPStore("127.0.0.1", host.port, None, is_master=False, wait_for_workers=False)
    assert limit_connections("127.0.0.1", host.port, 5.0) >= 1
    watch = JoinedWatch(client, 1, 2)
    watch.start()
    assert watch.store_is_lost() is None
    del host
    watch._thread.join(10)
    missing = watch.find_missing()
    assert missing.peer == 0
    assert "the job's store, on rank 0's host, has not answered for" in missing.text
    watch.stop()


def test_connections_to_the_store_alone_are_limited() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one, socket.create_connection(other.getsockname()) as two:
            assert limit_connections("127.0.0.1", port, 7.5) == 1
            found = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in (one, two)]
    assert found == [7500, 0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no-such-host.invalid"])
def test_no_interface_leads_to_a_master_on_loopback(host: str) -> None:
    assert interface_towards(host, 29500) is None


class SilentStore:
    """A server that accepts, and answers nothing: as the store of a process that was stopped."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        self.client = socket.create_connection(self.address)
        self.answered_at = time.monotonic()

    def guard(self, limit_s: float) -> StoreGuard:
        guard = StoreGuard(*self.address, limit_s, lambda: self.answered_at)
        guard.start()
        return guard

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def silent_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentStore]:
    monkeypatch.setattr(store_connections, "_LOOK_S", 0.01)
    store = SilentStore()
    yield store
    store.close()


def test_a_store_that_answers_nothing_does_not_hold_whoever_asks(silent_store: SilentStore) -> None:
    silent_store.client.settimeout(DEADLINE_S)
    guard = silent_store.guard(0.1)
    assert silent_store.client.recv(1) == b""  # the end, rather than a wait without one
    assert guard.has_shut
    guard.stop()


def test_a_store_that_answers_in_time_is_left_alone(silent_store: SilentStore) -> None:
    guard = silent_store.guard(0.3)
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        silent_store.answered_at = time.monotonic()
        assert not guard._is_over.wait(0.02)
    guard.stop()
    guard._thread.join(DEADLINE_S)
    assert not guard.has_shut
    assert silent_store.client.send(b"?") == 1


def test_a_process_that_was_stopped_itself_does_not_blame_the_store(
    silent_store: SilentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Between two looks an hour goes by: the process stood still, and so did the thread that hears the store.
    times = itertools.chain([0.0, 0.0, 3600.0], itertools.count(3600.0, 0.01))
    monkeypatch.setattr(store_connections, "time", SimpleNamespace(monotonic=lambda: next(times)))
    guard = silent_store.guard(5.0)
    guard._thread.join(0.2)
    assert guard._thread.is_alive()
    guard.stop()
    guard._thread.join(DEADLINE_S)
    assert not guard.has_shut
