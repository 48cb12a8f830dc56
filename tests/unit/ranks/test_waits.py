"""Ranks that come on no more, each for itself: told once, where steps say how long is long."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.ranks import hang_report, waits
from meshwright.ranks.heartbeat import RECORD_BYTES, Board, Pulse
from meshwright.ranks.pace import LEAST_S, LEAST_STEPS
from meshwright.ranks.processes import scratch_file
from meshwright.ranks.waits import Waits


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    lines = ["  rank 0 stands in its loader"]
    monkeypatch.setattr(waits, "lines_about", lambda *_, **__: lines)
    monkeypatch.setattr(hang_report, "lines_about", lambda *_, **__: lines)
    monkeypatch.setattr(waits, "hang_error", lambda *_, **__: waits.LostPeerError("a rank waits", rank=0))
    descriptor = scratch_file(2 * RECORD_BYTES)
    made = Board(descriptor, 2)
    os.close(descriptor)
    yield made
    made.close()


def after_steps(board: Board, phase: str) -> tuple[Waits, list[Pulse]]:
    found, pulses = Waits([], board, 60.0), [Pulse(board, rank) for rank in range(2)]
    for step in range(LEAST_STEPS + 2):
        for pulse in pulses:
            pulse.progress(step, "forward")
        assert found.look(time.monotonic()) is None
    for pulse in pulses:
        pulse.progress(LEAST_STEPS + 2, phase)
    return found, pulses


def test_ranks_that_all_stand_still_outside_of_exchanges_are_told_once(
    board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    found, pulses = after_steps(board, "load")
    now = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert found.look(now + 0.5 * LEAST_S) is None
        assert caplog.text == ""
        assert found.look(now + 1.5 * LEAST_S) is None
        assert found.look(now + 100 * LEAST_S) is None  # after a time without looks it ends no run
        assert caplog.text.count("no rank has come on for ") == 1
        assert "rank 0 stands in its loader" in caplog.text
        pulses[1].progress(LEAST_STEPS + 3, "load")
        assert found.look(time.monotonic()) is None
        assert caplog.text.count("no rank has come on for ") == 1


@pytest.mark.parametrize("phase", ["evaluate", "save"])
def test_what_no_step_tells_the_length_of_is_left_alone(
    board: Board, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, _ = after_steps(board, phase)
    with caplog.at_level(logging.WARNING):
        assert found.look(time.monotonic() + 100 * LEAST_S) is None
    assert caplog.text == ""


def test_ranks_that_stand_still_outside_of_exchanges_end_at_the_limit(board: Board) -> None:
    found, pulses = after_steps(board, "load")
    pulses[0].progress(LEAST_STEPS + 2, "step")
    now = time.monotonic()
    for second in range(61):
        assert found.look(now + second) is None
    number, error = found.look(now + 61.0) or (None, None)
    assert (number, getattr(error, "peer", None), error and error.exit_code) == (1, 1, 12)
    assert "rank 1 of 2 has not come on for 61.0 s" in str(error)
    assert "rank 0 stands in its loader" in str(error)


class Stopped:
    """A rank's process as a signal has left it."""

    has_died = False

    def __init__(self, rank: int, letter: str = "T") -> None:
        self.rank, self._letter = rank, letter

    def state_letter(self) -> str:
        return self._letter


# No rank waited for another, and no step had told its length: the launching process waited for ever.
@pytest.mark.parametrize(("letters", "phases"), [("TT", ("forward", "save")), ("ST", ("idle", "evaluate"))])
def test_ranks_that_are_all_stopped_end_at_the_limit(board: Board, letters: str, phases: tuple[str, str]) -> None:
    ranks: list[Any] = [Stopped(rank, letter) for rank, letter in enumerate(letters)]
    for rank, phase in enumerate(phases):
        Pulse(board, rank).progress(1, phase)
    found, now = Waits(ranks, board, 30.0), time.monotonic()
    looks = [found.look(now + second) for second in range(40)]
    assert looks[:31] == [None] * 31
    _, error = looks[-1] or (None, None)
    assert "stopped by SIGSTOP or a debugger: rank" in str(error)


@pytest.mark.parametrize("letters", ["ST", "SS"])
def test_ranks_of_which_one_works_are_left_alone(board: Board, letters: str) -> None:
    ranks: list[Any] = [Stopped(rank, letter) for rank, letter in enumerate(letters)]
    for rank in range(2):
        Pulse(board, rank).progress(1, "forward")
    found, now = Waits(ranks, board, 30.0), time.monotonic()
    assert [found.look(now + second) for second in range(100)] == [None] * 100


def test_a_wait_beyond_the_limit_is_an_error(board: Board) -> None:
    found, pulses = after_steps(board, "load")
    pulses[0].enter("all_reduce")
    assert found.look(time.monotonic() + 59.0) is None
    number, error = found.look(time.monotonic() + 61.0) or (None, None)
    assert number == 0
    assert "a rank waits" in str(error)
