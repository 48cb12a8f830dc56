"""Ends of other ranks' processes, as the ranks of the same host see them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from meshwright.host import process_numbers_place
from meshwright.ranks import joined_watch
from meshwright.ranks.joined_watch import FAILURE_KEY, JoinedWatch
from meshwright.ranks.neighbours import Neighbours

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no descriptors of processes")

QUICK_S = 5.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(10)


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[JoinedWatch, JoinedWatch]]:
    """Of ranks 0 and 1 of three; rank 0 alone is of rank 2's host."""
    monkeypatch.setattr(joined_watch, "_PERIOD_S", 60.0)  # an end is seen at once, or not in this test
    monkeypatch.setattr(joined_watch, "_SILENT_PERIODS", 1.0)
    store: Any = HashStore()
    made = JoinedWatch(store, 0, 3, range(3)), JoinedWatch(store, 1, 3)
    yield made
    for watch in made:
        watch.stop()


def begin(watches: tuple[JoinedWatch, JoinedWatch], child: subprocess.Popen[bytes], *, end: str = "") -> None:
    """Start the watches, with another process as rank 2; `end` is the last that it has told."""
    store = watches[0]._store
    watches[1]._tell()
    told = dataclasses.astuple(dataclasses.replace(watches[1]._told(1), pid=child.pid, end=end))
    store.set("told/2", json.dumps(told))
    store.set("process/2", json.dumps([process_numbers_place(), child.pid]))
    for watch in watches:
        watch.start()


def test_a_killed_rank_is_found_by_its_host_and_named_on_the_others(
    watches: tuple[JoinedWatch, JoinedWatch], child: subprocess.Popen[bytes]
) -> None:
    begin(watches, child)
    child.kill()
    began = time.monotonic()
    for watch in watches:
        missing = watch.find_missing()
        assert missing.ranks == (2,)
        assert "rank 2 has ended without a word" in missing.text
        assert "no sign of life" not in missing.text
    assert time.monotonic() - began < QUICK_S


def test_a_rank_that_has_said_why_it_ends_is_not_told_of(
    watches: tuple[JoinedWatch, JoinedWatch], child: subprocess.Popen[bytes]
) -> None:
    begin(watches, child, end="has left, since rank 1 is missing")
    child.kill()
    child.wait(10)
    watches[0]._thread.join(0.2)
    assert not watches[0]._store.check(["ended"])


@pytest.mark.parametrize("tells", [False, True, "no store"])
def test_a_missing_rank_that_gives_no_sign_of_life_is_killed(
    watches: tuple[JoinedWatch, JoinedWatch],
    child: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    tells: bool | str,
) -> None:
    monkeypatch.setattr(joined_watch, "_SILENT_PERIODS", 0.01)  # 0.6 s
    begin(watches, child)
    deadline = time.monotonic() + QUICK_S
    while not watches[0]._neighbours.knows(2):
        assert time.monotonic() < deadline
    child.send_signal(signal.SIGSTOP)
    missing = watches[0].find_missing()
    assert (missing.ranks[0], 2 in missing.silent) == (1, True)  # the test's rank 1 tells nothing new, either
    told = iter(range(100))
    known = watches[0]._told(2)

    def tell(_: int) -> Any:
        if tells == "no store" and next(told):  # it goes with the agent of another host, in between
            raise RuntimeError("connection reset")
        return dataclasses.replace(known, count=next(told))

    if tells:
        monkeypatch.setattr(watches[0], "_told", tell)
    watches[0].end_stuck(2)
    if tells is True:
        assert child.poll() is None
    else:
        assert child.wait(QUICK_S) == -signal.SIGKILL
    watches[1].end_stuck(2)  # of another host: nothing to do


def test_a_failure_that_is_told_ends_the_search(
    watches: tuple[JoinedWatch, JoinedWatch], child: subprocess.Popen[bytes]
) -> None:
    begin(watches, child)
    watches[0]._store.set(FAILURE_KEY, "{}")
    began = time.monotonic()
    assert watches[1].find_missing().ranks == ()
    assert time.monotonic() - began < QUICK_S


def test_processes_of_another_place_are_not_looked_at(child: subprocess.Popen[bytes]) -> None:
    store: Any = HashStore()
    found = Neighbours(store, 0, range(4))
    store.set("process/1", json.dumps(["another machine", child.pid]))
    store.set("process/2", json.dumps([process_numbers_place(), child.pid]))
    assert found.find() == []
    child.kill()
    assert found.look(QUICK_S) == [2]
    child.wait(10)
    store.set("process/3", json.dumps([process_numbers_place(), child.pid]))
    assert found.find() == [3]  # its number is nobody's any more
    found.wake()
    assert found.look(QUICK_S) == []
    found.close()


@pytest.mark.parametrize(
    ("store_rank", "answers", "is_killed"), [(2, False, True), (2, True, False), (None, False, False)]
)
def test_a_rank_whose_store_answers_nothing_is_ended_by_its_host(
    child: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    store_rank: int | None,
    answers: bool,
    is_killed: bool,
) -> None:
    monkeypatch.setattr(joined_watch, "_PERIOD_S", 0.05)
    store: Any = HashStore()
    watch = JoinedWatch(store, 0, 3, range(3), store_rank=store_rank)
    store.set("process/2", json.dumps([process_numbers_place(), child.pid]))
    watch._neighbours.find()
    if answers:
        monkeypatch.setattr(watch._is_over, "wait", lambda _s: watch._tell())
    watch.end_store_rank()
    if is_killed:
        assert child.wait(QUICK_S) == -signal.SIGKILL
    else:
        assert child.poll() is None
    watch._neighbours.close()
