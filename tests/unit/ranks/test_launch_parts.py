"""The pieces under launch: the channel, the shared record, the limits, stop signals."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from meshwright import host
from meshwright.errors import ConfigError
from meshwright.ranks.channel import ParentEnd, RankEnd, pack, read_plain, read_result
from meshwright.ranks.heartbeat import RECORD_BYTES, Board, Pulse
from meshwright.ranks.launch import _threads
from meshwright.ranks.link import RankLink
from meshwright.ranks.processes import scratch_file
from meshwright.ranks.signals import StopSignals
from meshwright.ranks.world import current_world


@pytest.fixture
def ends() -> Iterator[tuple[ParentEnd, RankEnd]]:
    ours, theirs = socket.socketpair()
    parent = ParentEnd(ours)
    yield parent, RankEnd(theirs)
    parent.close()
    theirs.close()


def receive_all(parent: ParentEnd, count: int) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    while len(found) < count:
        found += parent.receive()
    return found


def test_messages_cross_both_ways(ends: tuple[ParentEnd, RankEnd]) -> None:
    parent, rank = ends
    parent.send(pack(("call", b"x")))
    assert rank.receive() == ("call", b"x")
    for number in range(3):
        rank.send(("event", number))
    assert receive_all(parent, 3) == [("event", 0), ("event", 1), ("event", 2)]


def test_the_parent_never_blocks_on_a_rank_that_does_not_read(ends: tuple[ParentEnd, RankEnd]) -> None:
    parent, rank = ends
    payload = bytes(4 << 20)
    parent.send(pack(("call", payload)))
    assert parent.has_unsent
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.append(rank.receive()))
    reader.start()
    while parent.has_unsent:
        parent.flush()
    reader.join(10)
    assert received == [("call", payload)]


def test_a_large_message_comes_whole_and_tensors_come_as_values(ends: tuple[ParentEnd, RankEnd]) -> None:
    parent, rank = ends
    tensor = torch.arange(1 << 20)
    sender = threading.Thread(target=rank.send, args=(("result", pickle.dumps(tensor)),))
    sender.start()
    ((_, received),) = receive_all(parent, 1)
    sender.join(10)
    assert torch.equal(read_result(received), tensor)  # type: ignore[arg-type]


def test_the_end_of_the_stream_is_seen_on_both_sides(ends: tuple[ParentEnd, RankEnd]) -> None:
    parent, rank = ends
    rank.send(("event", 1))
    rank._socket.shutdown(socket.SHUT_RDWR)
    assert parent.receive() == [("event", 1)]
    assert parent.closed
    parent.send(pack(("stop",)))  # nobody is there: no error
    assert rank.receive() is None


class _CannotBeRebuilt:
    def __reduce__(self) -> tuple[object, ...]:
        return (_broken, ())


def _broken() -> None:
    raise ArithmeticError("not here")


def test_what_is_no_plain_data_is_told_and_not_run_and_the_channel_goes_on(ends: tuple[ParentEnd, RankEnd]) -> None:
    parent, rank = ends
    rank.send(("result", _CannotBeRebuilt()))
    rank.send(("event", 2))
    found = receive_all(parent, 2)
    assert found == [("unreadable", f"{__name__}._broken is no plain data"), ("event", 2)]
    with pytest.raises(ArithmeticError, match="not here"):
        read_result(pickle.dumps(_CannotBeRebuilt()))


PLAIN = (
    "result",
    None,
    True,
    2**70,
    -1.5,
    "ä\ud800\n" * 3,
    b"\n" * 70_000,
    [{"a": (1, {2}, frozenset({3}))}],
    bytearray(b"x"),
)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_data_is_read_as_it_was_sent(protocol: int) -> None:
    value = PLAIN if protocol == 5 else PLAIN[:6]  # older protocols write bytes and sets as calls
    assert read_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("data", [b"", b"\x80", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x05\x8cx.", b"i" * 99, b"."])
def test_damaged_messages_are_errors_of_one_kind(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read_plain(data)


def test_what_cannot_be_sent_leaves_the_channel_whole(ends: tuple[ParentEnd, RankEnd]) -> None:
    parent, rank = ends
    with pytest.raises(Exception, match="pickle"):
        rank.send(("result", lambda: None))
    rank.send(("event", 3))
    assert receive_all(parent, 1) == [("event", 3)]


@pytest.fixture
def board() -> Iterator[Board]:
    descriptor = scratch_file(2 * RECORD_BYTES)
    board = Board(descriptor, 2)
    yield board
    board.close()
    os.close(descriptor)


def test_records_do_not_touch_each_other(board: Board) -> None:
    untouched = board.read(0)
    pulse = Pulse(board, 1)
    pulse.progress(2**40, "x" * 100)
    pulse.enter("reduce_scatter" * 10)
    pulse.memory(2**45, 2**46, 7)
    pulse.memory_group("/" + "g" * 500)
    record = board.read(1)
    assert (record.step, record.phase) == (2**40, "x" * 31)
    assert record.is_waiting
    assert record.collective.startswith("reduce_scatter")
    assert (record.rss_bytes, record.memory_limit_bytes, record.num_oom_kills) == (2**45, 2**46, 7)
    assert len(record.memory_group) == 255
    assert board.read(0) == untouched


def test_waits_within_waits_count_from_the_first(board: Board) -> None:
    pulse = Pulse(board, 0)
    pulse.enter("all_reduce")
    since = board.read(0).waiting_since
    pulse.enter("barrier")
    pulse.leave()
    assert board.read(0).waiting_since == since
    assert board.read(0).collective == "all_reduce"
    pulse.leave()
    assert not board.read(0).is_waiting
    assert board.read(0).num_left == 2


def test_the_cores_respect_the_affinity_mask() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert host.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)
    assert 1 <= host.usable_cores() <= len(mask)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quotas_of_both_versions(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None
) -> None:
    from pathlib import Path

    directory = Path(str(tmp_path))
    for name, text in files.items():
        (directory / name).write_text(text + "\n")
    monkeypatch.setattr(host, "_group_directories", lambda controller: [directory])
    assert host._cpu_quota() == quota


def test_threads_are_shared_out_unless_somebody_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("meshwright.ranks.launch.usable_cores", lambda: 8)
    assert _threads(2, None, None) == 4
    assert _threads(16, None, None) == 1
    assert _threads(2, 3, {"OMP_NUM_THREADS": "7"}) == 3
    assert _threads(2, None, {"OMP_NUM_THREADS": "7"}) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _threads(2, None, None) is None


def test_stop_signals_are_noted_and_the_handlers_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with StopSignals() as noted:
        signal.raise_signal(signal.SIGTERM)
        assert (noted.first, noted.interrupted_again) == ("SIGTERM", False)
        signal.raise_signal(signal.SIGINT)
        assert (noted.first, noted.interrupted_again) == ("SIGTERM", True)
    assert before == {number: signal.getsignal(number) for number in before}


def test_a_second_interrupt_can_raise() -> None:
    with StopSignals(raise_second=True) as noted:
        signal.raise_signal(signal.SIGINT)
        assert noted.first == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is not noted._note


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as noted:
            signal.raise_signal(signal.SIGHUP)
            assert noted.first is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_installed() -> None:
    found: list[object] = []

    def look() -> None:
        with StopSignals():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_plain_process_is_in_no_world() -> None:
    assert current_world() is None


def test_an_event_crosses_as_plain_data(ends: tuple[ParentEnd, RankEnd]) -> None:
    # A pickled `torch.__version__` made the launching process import torch, in the middle of the run.
    parent, rank = ends
    link = RankLink(rank, Mock())
    link.emit({"torch": torch.__version__, "loss": 0.5})
    assert receive_all(parent, 1) == [("event", json.dumps({"torch": str(torch.__version__), "loss": 0.5}))]
    with pytest.raises(ConfigError, match="plain data"):
        link.emit({"loss": torch.zeros(())})
    with pytest.raises(ConfigError, match="1 is the key of an entry"):  # it would arrive as text
        link.emit({"losses": [{"0": 0.5}, {1: 0.5}]})
