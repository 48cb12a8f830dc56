"""A peer dies while others exchange with it over shared memory, and nobody watches but the backend itself."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from tests.faults.jobs import shm_jobs
from tests.faults.shm_ranks import Ranks, Zygote, holders, segments
from tests.scopes import FULL_GRID

"""Every operation in both of its forms; by default they take turns: how one waits is no question of what is exchanged."""

LIMIT_S = 1.0
# How long a call may take that needs nobody to find out that the group is lost; the cores are shared with other ranks.
AT_ONCE_S = 0.5

OPERATIONS = {
    "all_reduce": shm_jobs.BIG,
    "all_reduce, small": shm_jobs.SMALL,
    "all_gather": shm_jobs.BIG,
    "all_gather_into_tensor": shm_jobs.BIG,
    "reduce_scatter": shm_jobs.BIG,
    "broadcast": shm_jobs.BIG,
    "reduce": shm_jobs.BIG,
    "gather": shm_jobs.BIG,
    "scatter": shm_jobs.BIG,
    "all_to_all": shm_jobs.BIG,
    "barrier": shm_jobs.SMALL,
    "send": shm_jobs.BIG,
    "recv": shm_jobs.BIG,
}


def check_survivors(ranks: Ranks, victim: int, killed_at: float, word: str = "is gone") -> None:
    """All others have raised in time, for the right reason, and raise again at once."""
    name = f"rank {victim} (process {ranks.pid(victim)})"
    survivors = [rank for rank in range(ranks.size) if rank != victim]
    firsts = ranks.hear_all("first", survivors)
    for rank, first in zip(survivors, firsts, strict=True):
        assert first["kind"] in ("PeerGoneError", "DistBackendError"), first
        assert name in first["text"], first
        assert first["peer"] == (victim if first["kind"] == "PeerGoneError" else None), first
        assert first["at"] - killed_at < LIMIT_S, first
        for again in ("again", "posted", "barrier", "send"):
            check_again(ranks.hear(rank, again), name)
    # Whoever saw it first says how; the others may say who told them.
    assert any(f"{name} {word}" in first["text"] for first in firsts), firsts


def check_again(again: dict[str, Any], name: str) -> None:
    assert again["kind"] == "PeerGoneError", again
    assert name in again["text"], again
    assert again["at"] - again["began"] < AT_ONCE_S, again


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_awaited_peer_is_killed(zygote: Zygote, operation: str, size: int) -> None:
    check_awaited(zygote, operation, size, "sync")


FORMS = ("wait", "future")


@pytest.mark.parametrize(
    ("operation", "form"),
    [
        (operation, form)
        for index, operation in enumerate(OPERATIONS)
        for place, form in enumerate(FORMS)
        if FULL_GRID or (index + place) % 2 == 0
    ],
)
def test_the_awaited_peer_of_an_async_operation_is_killed(zygote: Zygote, operation: str, form: str) -> None:
    check_awaited(zygote, operation, 2, form)


def check_awaited(zygote: Zygote, operation: str, size: int, form: str) -> None:
    kind, count = operation.partition(",")[0], OPERATIONS[operation]
    # The victim has to be the one that is needed: who receives from it, who sends to it.
    victim = 1
    survivors = [rank for rank in range(size) if rank != victim]
    with zygote.ranks("wait_for_peers_death", size, kind=kind, count=count, form=form, victim=victim) as ranks:
        ranks.hear(victim, "ready")
        ranks.hear_all("entering", survivors)
        ranks.await_sleep(survivors)
        check_survivors(ranks, victim, ranks.signal(victim, signal.SIGKILL))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("operation", [name for name, count in OPERATIONS.items() if count == shm_jobs.BIG])
def test_killed_in_the_middle_of_a_transfer(zygote: Zygote, operation: str, size: int) -> None:
    check_in_the_middle(zygote, operation, size, shm_jobs.BIG)


@pytest.mark.parametrize("operation", ["all_reduce", "send"])
def test_killed_in_the_middle_of_64_mib(zygote: Zygote, operation: str) -> None:
    check_in_the_middle(zygote, operation, 2, shm_jobs.LARGEST)


def check_in_the_middle(zygote: Zygote, operation: str, size: int, count: int) -> None:
    victim = 1
    survivors = [rank for rank in range(size) if rank != victim]
    with zygote.ranks("stand_inside", size, kind=operation, count=count, victim=victim) as ranks:
        ranks.hear_all("entering")
        ranks.await_half_way(victim)
        ranks.await_sleep(survivors)
        check_survivors(ranks, victim, ranks.signal(victim, signal.SIGKILL))


# What is one round is done with once all have laid out their part: a rank that dies then has done its duty.
@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("all_reduce", shm_jobs.SMALL, 3.0),
        ("broadcast", shm_jobs.SMALL, 2.0),
        ("send", shm_jobs.SMALL, 2.0),
        ("barrier", shm_jobs.SMALL, 1.0),
        ("all_reduce", shm_jobs.BIG, None),
        ("broadcast", shm_jobs.BIG, None),
        ("send", shm_jobs.BIG, None),
    ],
)
def test_a_rank_that_comes_after_the_death(zygote: Zygote, kind: str, count: int, expected: float | None) -> None:
    with zygote.ranks("enter_late", 2, kind=kind, count=count, victim=1) as ranks:
        ranks.hear(0, "ready")
        ranks.hear(1, "entering")
        ranks.await_sleep([1])
        ranks.signal(1, signal.SIGKILL)
        ranks.hear(1, "exit")
        late_at = ranks.signal(0, signal.SIGUSR1)
        first = ranks.hear(0, "first")
        name = f"rank 1 (process {ranks.pid(1)})"
        if expected is None:
            assert f"{name} is gone" in first["text"]
        else:
            assert first["kind"] is None, first
            assert first["result"] == expected
        # Who is dead already is not waited for.
        assert first["at"] - late_at < LIMIT_S / 2
        again = ranks.hear(0, "again")
        assert f"{name} is gone" in again["text"]
        for each in ("posted", "barrier", "send"):
            check_again(ranks.hear(0, each), name)


def test_a_rank_of_a_part_of_the_world_is_killed(zygote: Zygote) -> None:
    # Its number in the group is another than its number in the world.
    with zygote.ranks("be_in_a_part", 4, members=[1, 2, 3], victim=2) as ranks:
        ranks.hear_all("ready", [0, 2])
        ranks.hear_all("entering", [1, 3])
        ranks.await_sleep([1, 3])
        killed_at = ranks.signal(2, signal.SIGKILL)
        name = f"rank 2 (process {ranks.pid(2)})"
        for rank in (1, 3):
            first = ranks.hear(rank, "first")
            assert name in first["text"]
            assert first["at"] - killed_at < LIMIT_S
            check_again(ranks.hear(rank, "in the part"), name)
            # The world is lost to them, too, which they find out when they use it.
            again = ranks.hear(rank, "again")
            assert name in again["text"]
            assert again["at"] - again["began"] < LIMIT_S


def test_everything_outstanding_has_the_same_cause(zygote: Zygote) -> None:
    with zygote.ranks("have_many_outstanding", 2, victim=1) as ranks:
        ranks.hear(1, "ready")
        ranks.hear(0, "entering")
        ranks.await_sleep([0])
        killed_at = ranks.signal(1, signal.SIGKILL)
        ranks.hear(0, "chained", 5)
        name = f"rank 1 (process {ranks.pid(1)}) is gone"
        ends = [each for key in ("first", "posted", "futures", "chained") for each in ranks.said(0, key)]
        assert len(ends) == 16
        for each in ends:
            # Of what a callback raises torch makes a text, and a RuntimeError of its own.
            assert each["kind"] == ("RuntimeError" if "callback: PeerGoneError" in each["text"] else "PeerGoneError"), (
                each
            )
            assert name in each["text"], each
            assert each["at"] - killed_at < LIMIT_S


def test_nothing_is_left_of_ranks_that_are_all_killed(zygote: Zygote) -> None:
    before = set(os.listdir("/dev/shm"))
    with zygote.ranks("stand_inside", 3, kind="all_reduce", count=shm_jobs.BIG, victim=1) as ranks:
        ranks.hear_all("entering")
        ranks.await_half_way(1)
        pids = [ranks.pid(rank) for rank in range(3)]
        # While they run, the memory has no name and no open file: the mappings alone hold it.
        assert set(os.listdir("/dev/shm")) <= before
        (segment,) = segments(pids)
        assert holders(segment) == dict.fromkeys(pids, "mapping")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ranks.hear_all("exit")
        assert holders(segment) == {}
        assert set(os.listdir("/dev/shm")) <= before
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize(
    ("how", "word", "status"),
    [
        ("exit", "is gone", 0),
        ("return", "has left the group", 0),
        ("raise", "has left the group", 10),
        ("destroy", "has left the group", None),
        ("abort", "gave up", None),
    ],
)
def test_a_peer_that_goes_by_its_own_will(zygote: Zygote, how: str, word: str, status: int | None) -> None:
    with zygote.ranks("leave", 3, how=how, victim=1, finalizes=how in ("return", "raise")) as ranks:
        ranks.hear(1, "ready")
        ranks.hear_all("entering", [0, 2])
        ranks.await_sleep([0, 2])
        left_at = ranks.signal(1, signal.SIGUSR1)
        if status is not None:
            # An interpreter with torch takes a while to end; from then on the limit holds.
            ranks.hear(1, "exit")
            left_at = time.monotonic()
        check_survivors(ranks, 1, left_at, word)
        if status is not None:
            assert ranks.hear(1, "exit") == status
