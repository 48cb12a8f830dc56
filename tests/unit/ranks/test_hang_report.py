"""What a waiting rank's report asks of the ranks: all of their threads where they end, their main thread where they go on."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time

import pytest

from meshwright.errors import LostPeerError
from meshwright.ranks.hang_report import STACK_SIGNAL, hang_error
from meshwright.ranks.heartbeat import RECORD_BYTES, Board, Pulse
from meshwright.ranks.processes import RankProcess, scratch_file


def stand(stack_file: int, writing: int) -> None:
    """Stand still as a rank does; a request for the stacks of all threads ends the process, as it may end a real one."""
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=False)
    os.write(writing, b"!")
    threading.Event().wait(20.0)


@pytest.mark.parametrize("goes_on", [True, False])
def test_other_threads_are_asked_only_where_the_ranks_end(goes_on: bool) -> None:
    error, ended, status = report_about_a_child(goes_on=goes_on)
    assert "in stand" in error.message
    assert "rank 0 of 1 has waited" in error.message
    assert "in all_reduce" in error.message
    assert bool(ended) is not goes_on, status


def test_a_rank_that_was_stopped_in_an_exchange_is_the_missing_one() -> None:
    # As its peers do, it seems to wait: the campaign had "FATAL rank=unknown" of it.
    error, _, _ = report_about_a_child(goes_on=True, is_stopped=True)
    assert error.peer == 0
    assert "it is stopped (SIGSTOP)" in error.message
    assert "; stopped by SIGSTOP or a debugger: rank 0\n" in error.message  # in the line that a log shows
    assert "find what has stopped that process" in str(error.fix)


def report_about_a_child(*, goes_on: bool, is_stopped: bool = False) -> tuple[LostPeerError, int, int]:
    """Return the error about a child that waits, and whether and how that has ended."""
    with contextlib.ExitStack() as stack:
        rank = RankProcess(0, {"world_size": 1})
        stack.callback(rank.close)
        records = scratch_file(RECORD_BYTES)
        stack.callback(os.close, records)
        board = Board(records, 1)
        stack.callback(board.close)
        pulse = Pulse(board, 0)
        pulse.progress(30, "forward")
        pulse.enter("all_reduce")
        reading, writing = os.pipe()
        rank.pid = os.fork()
        if rank.pid == 0:
            try:
                stand(rank.stack_file, writing)
            finally:
                os._exit(0)
        os.read(reading, 1)
        if is_stopped:
            os.kill(rank.pid, signal.SIGSTOP)
            os.waitpid(rank.pid, os.WUNTRACED)
        error = hang_error([rank], board, 0, time.monotonic(), 300.0, goes_on=goes_on)
        ended, status = os.waitpid(rank.pid, os.WNOHANG)
        if not ended:
            os.kill(rank.pid, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
        for end in (reading, writing):
            os.close(end)
    return error, ended, status
