"""A peer that stands still for a while, or for too long; and what waiting costs."""

from __future__ import annotations

import contextlib
import signal

import pytest
from tests.faults.jobs import shm_jobs
from tests.faults.shm_ranks import Zygote
from tests.faults.test_shm_killed import check_again

TIMEOUT_S = 2.0
LATE_S = 0.5


def test_a_stopped_peer_is_named_when_the_time_is_over(zygote: Zygote) -> None:
    # Beside each other, since each takes the whole time.
    cases = [
        ("all_reduce", shm_jobs.BIG, "sync", 3),
        ("barrier", shm_jobs.SMALL, "sync", 2),
        ("send", shm_jobs.SMALL, "sync", 2),
        ("recv", shm_jobs.BIG, "sync", 2),
        ("all_gather", shm_jobs.SMALL, "wait", 2),
        ("send", shm_jobs.SMALL, "future", 2),
    ]
    with contextlib.ExitStack() as stack:
        groups = []
        for kind, count, form, size in cases:
            args = {"kind": kind, "count": count, "form": form, "victim": 1}
            ranks = stack.enter_context(zygote.ranks("wait_for_peers_death", size, timeout_s=TIMEOUT_S, **args))
            ranks.hear(1, "ready")
            ranks.stop(1)
            groups.append(ranks)
        for ranks in groups:
            name = f"rank 1 (process {ranks.pid(1)})"
            for rank in set(range(ranks.size)) - {1}:
                first = ranks.hear(rank, "first")
                assert first["kind"] in ("PeerGoneError", "DistBackendError"), first
                assert f"{name}, stopped, did not come: timed out after 2 s" in first["text"], first
                # Of an error in a future torch keeps the text alone.
                assert first["peer"] == (1 if first["kind"] == "PeerGoneError" else None), first
                assert TIMEOUT_S <= first["at"] - first["began"] < TIMEOUT_S + LATE_S, first
                for again in ("again", "posted", "barrier", "send"):
                    check_again(ranks.hear(rank, again), name)


def test_of_two_late_peers_none_is_the_one_to_blame(zygote: Zygote) -> None:
    with zygote.ranks("wait_alone", 3, timeout_s=TIMEOUT_S) as ranks:
        first = ranks.hear(0, "first")
        assert all(f"rank {rank} (process {ranks.pid(rank)})" in first["text"] for rank in (1, 2)), first
        assert first["peer"] == -1, first


def test_a_stopped_peer_that_goes_on_finds_that_the_others_gave_up(zygote: Zygote) -> None:
    args = {"kind": "all_reduce", "count": shm_jobs.BIG, "victim": 1}
    with zygote.ranks("stand_inside", 2, timeout_s=0.5, **args) as ranks:
        ranks.await_half_way(1)
        ranks.stop(1)
        first = ranks.hear(0, "first")
        ranks.hear(0, "exit")
        assert f"rank 1 (process {ranks.pid(1)}), stopped, did not come" in first["text"]
        ranks.complete(1)
        ranks.signal(1, signal.SIGCONT)
        first = ranks.hear(1, "first")
        assert f"rank 0 (process {ranks.pid(0)}) gave up: it lost rank 1 (process {ranks.pid(1)})" in first["text"]


@pytest.mark.parametrize(
    # What the data adds up to, on either rank: it is 1, and 0 in the second half of what rank 1 has.
    ("kind", "total"),
    [("all_reduce", 1.5), ("broadcast", 0.5), ("send", 0.5), ("all_to_all", None)],
)
def test_a_peer_that_is_stopped_in_the_middle_and_goes_on(zygote: Zygote, kind: str, total: float | None) -> None:
    count = shm_jobs.BIG
    with zygote.ranks("stand_inside", 2, kind=kind, count=count, victim=1) as ranks:
        ranks.hear_all("entering")
        ranks.await_half_way(1)
        ranks.stop(1)
        # The other looks at it several times meanwhile, and sees nothing to complain of.
        ranks.await_naps(0, 4)
        assert not ranks.said(0, "first")
        ranks.complete(1)
        ranks.signal(1, signal.SIGCONT)
        for first in ranks.hear_all("first"):
            assert first["kind"] is None, first
            assert total is None or first["result"] == total * count
        for key in ("again", "posted", "barrier"):
            assert [each["kind"] for each in ranks.hear_all(key)] == [None, None]


def test_who_waits_leaves_the_cores_to_who_computes(zygote: Zygote) -> None:
    with zygote.ranks("wait_for_a_busy_peer", 4, busy_s=1.0) as ranks:
        for rank in range(1, 4):
            used = ranks.hear(rank, "used")
            assert used["wall_s"] > 0.9, used
            assert used["cpu_s"] < 0.1 * used["wall_s"], used
