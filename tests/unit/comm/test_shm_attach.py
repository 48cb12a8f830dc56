"""How the ranks of a group come to one segment, or to one reason why there is none; threads stand for ranks."""

from __future__ import annotations

import concurrent.futures
import datetime
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from meshwright.comm.shm import attach as module
from meshwright.comm.shm import backend
from meshwright.comm.shm.attach import Attached, CannotAttachError, attach
from meshwright.comm.shm.build import BuildError

_local = threading.local()


class Extension:
    """Stands for the compiled one: a segment that only remembers which file it was given."""

    class Segment:
        def __init__(self, *, file: int, rank: int, nonce: int, create: bool, **_: int) -> None:
            if not create and rank in getattr(Extension, "broken", ()):
                raise RuntimeError("the segment belongs to another group")
            self.rank, self.nonce, self.create, self.inode = rank, nonce, create, os.fstat(file).st_ino


def run(
    size: int, before: Callable[[int], None] = lambda rank: None, store: HashStore | None = None
) -> list[Attached | CannotAttachError]:
    """Let ranks attach, and return what each got."""
    store = store or HashStore()

    def rank_of(rank: int) -> Attached | CannotAttachError:
        _local.rank = rank
        before(rank)
        try:
            return attach(store, rank, [10 + rank for rank in range(size)])
        except CannotAttachError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_of, range(size)))


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_extension", lambda: Extension)


def test_all_get_the_segment_of_rank_0() -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = run(3)
    for rank, attached in enumerate(found):
        assert isinstance(attached, Attached)
        assert [file == -1 for file in attached.process_files] == [peer == rank for peer in range(3)]
        for file in attached.process_files:
            if file >= 0:
                os.close(file)
    segments = [attached.segment for attached in found if isinstance(attached, Attached)]
    assert [segment.create for segment in segments] == [True, False, False]
    assert len({segment.inode for segment in segments}) == 1
    assert len({segment.nonce for segment in segments}) == 1
    # The segment's file itself is closed: nobody else can come to it.
    assert len(os.listdir("/proc/self/fd")) == before


def _close(found: Sequence[object]) -> list[int]:
    """Close what the ranks got; returns the nonces of their segments."""
    nonces = []
    for attached in found:
        assert isinstance(attached, Attached)
        nonces.append(attached.segment.nonce)
        for file in attached.process_files:
            if file >= 0:
                os.close(file)
    return nonces


def test_a_store_that_saw_a_group_before_gives_the_next_one_its_own_segment() -> None:
    """Under torchrun the agent's store stays when a group is destroyed and made again."""
    store = HashStore()
    first, second = _close(run(2, store=store)), _close(run(2, store=store))
    assert first[0] == first[1] != second[0] == second[1]


@pytest.mark.parametrize("early", [0, 1])
def test_what_a_group_left_in_the_store_is_not_taken_for_a_rank_that_has_not_come(early: int) -> None:
    store = HashStore()
    _close(run(2, store=store))
    with pytest.raises(RuntimeError, match=f"rank {11 - early} did not come to a group of 2: .*[Tt]imeout"):
        attach(store, early, [10, 11], datetime.timedelta(milliseconds=50))


def check_refused(found: list[Any], reason: str, *, is_expected: bool = False) -> None:
    assert all(isinstance(each, CannotAttachError) for each in found), found
    assert len({str(each) for each in found}) == 1
    assert reason in str(found[0])
    assert [each.is_expected for each in found] == [is_expected] * len(found)


@pytest.mark.parametrize("guilty", [0, 2])
def test_one_rank_without_the_extension_is_enough(monkeypatch: pytest.MonkeyPatch, guilty: int) -> None:
    def load() -> Any:
        if _local.rank == guilty:
            raise BuildError("no compiler here")
        return Extension

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, "load_extension", load)
    check_refused(run(3), "no compiler here")
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_rank_that_cannot_open_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(Extension, "broken", (1,), raising=False)
    check_refused(run(3), "rank 11 cannot reach the segment of rank 10: the segment belongs to another group")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    opened: list[int] = []

    def open_process(pid: int) -> int:
        opened.append(_local.rank)
        if opened.count(1) == 2:  # rank 1 has opened one already, which has to be closed again
            raise ProcessLookupError(3, "No such process")
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(os, "pidfd_open", open_process)
    check_refused(run(3), "No such process")
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_in_different_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_place", lambda: f"host {_local.rank // 2}")
    check_refused(run(4), "ranks 10 and 12 are on different hosts", is_expected=True)


def test_a_place_that_cannot_be_told_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._place() == module._place()

    def fail(*_: Any) -> str:
        raise OSError("no /proc here")

    monkeypatch.setattr(Path, "read_text", fail)
    assert module._place() != module._place()


def test_more_ranks_than_a_segment_holds() -> None:
    cards = [module._Card("here", 1)] * (module.MAX_RANKS + 1)
    with pytest.raises(CannotAttachError, match="holds at most 64 ranks, the group has 65"):
        module._refuse(cards, range(len(cards)))
    module._refuse(cards[:-1], range(module.MAX_RANKS))


def test_one_rank_says_it_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_told", set())
    with caplog.at_level(logging.DEBUG, "meshwright"):
        for rank in (0, 1, 0):
            backend._tell(CannotAttachError("no compiler"), rank)
            backend._tell(CannotAttachError("two hosts", is_expected=True), rank)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "they use gloo over TCP: no compiler" in warnings[0]
    assert [record.levelno for record in caplog.records].count(logging.DEBUG) == 3
