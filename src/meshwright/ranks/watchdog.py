"""Watchdog: the thread in each rank that watches the main thread for memory, signals, and exceptions that cannot get out.

A `finally` that waits for peers hides the exception above it: the peers wait for this rank, this rank waits for them, and the
cause is lost in a timeout. The watchdog sees such an exception from outside. It reports one only under three conditions.
The exception has been leaving a `try` whose `finally`, or a `with` whose exit, runs for over a second. No exchange has ended here
since. And a peer has waited for over a second. An `except` block is never reported, however long it takes.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from meshwright.garbage import paused_collection
from meshwright.host import memory_group, resident_bytes
from meshwright.ranks import unfinished
from meshwright.ranks.error_transfer import WORKER_FILE, describe_error

if TYPE_CHECKING:
    from meshwright.ranks.channel import RankEnd
    from meshwright.ranks.heartbeat import Board, Pulse
    from meshwright.ranks.link import RankLink

__all__: list[str] = []

_PERIOD_S = 0.2
_IDLE_PERIOD_S = 1.0  # where no call runs: a pool keeps ranks for the next one
_GROUP_PERIOD_S = 1.0
_PATIENCE_S = 1.0
_MARK = "_meshwright_mark"  # by it an exception is known again: most kinds take no weak reference


def start(channel: RankEnd, link: RankLink, board: Board, pulse: Pulse, rank: int) -> None:
    """Start this rank's watchdog."""
    watchdog = _Watchdog(channel, link, board, pulse, rank)
    threading.Thread(target=watchdog.run, name="meshwright-watchdog", daemon=True).start()


class _Watchdog:
    def __init__(self, channel: RankEnd, link: RankLink, board: Board, pulse: Pulse, rank: int) -> None:
        self._channel = channel
        self._link = link
        self._board = board
        self._pulse = pulse
        self._rank = rank
        self._main_thread = threading.main_thread().ident or 0
        self._signal_told = False
        self._group_checked_at = 0.0
        self._limit_bytes = 0
        self._num_oom_kills = -1
        self._mark = 0  # of the exception seen last
        self._seen_at = 0.0
        self._left_when_seen = 0

    def run(self) -> None:
        while True:
            self._pause()
            now = time.monotonic()
            self._note_memory(now)
            if self._link.signal_name is not None and not self._signal_told:
                self._signal_told = True
                self._channel.send(("stop", self._link.signal_name))
            self._look_for_exception(now)

    def _pause(self) -> None:
        if self._link.is_busy.is_set():
            time.sleep(_PERIOD_S)
        else:
            self._link.is_busy.wait(_IDLE_PERIOD_S)  # the beginning of a call ends it

    def _note_memory(self, now: float) -> None:
        if now - self._group_checked_at > _GROUP_PERIOD_S:
            self._group_checked_at = now
            group = memory_group()
            if group is not None:
                self._limit_bytes, self._num_oom_kills = group.limit_bytes, group.num_oom_kills()
                self._pulse.memory_group(group.directory)
        self._pulse.memory(resident_bytes(), self._limit_bytes, self._num_oom_kills)

    def _look_for_exception(self, now: float) -> None:
        error = _handled_exception(self._main_thread)
        if error is None or vars(error).get(_MARK) != self._mark:
            # A reference would keep what its frames hold past its `except` block: a whole model, or what did not fit.
            self._mark += 1
            if error is not None:
                vars(error)[_MARK] = self._mark
            self._seen_at = now
            self._left_when_seen = self._board.read(self._rank).num_left
            return
        if now - self._seen_at < _PATIENCE_S or not self._peer_waits(now):
            return
        if isinstance(error, SystemExit) and unfinished.under_way():
            return  # it leaves on purpose, and closes its model, which waits for the disk
        with paused_collection():
            frame = sys._current_frames().get(self._main_thread)
        if self._board.read(self._rank).num_left == self._left_when_seen and is_in_flight(error, frame):
            self._tell(error, frame)
            self._seen_at = float("inf")

    def _peer_waits(self, now: float) -> bool:
        peers = (self._board.read(rank) for rank in range(self._board.num_ranks) if rank != self._rank)
        return any(beat.is_waiting and now - beat.waiting_since > _PATIENCE_S for beat in peers)

    def _tell(self, error: BaseException, frame: FrameType | None) -> None:
        info = describe_error(unfinished.noted(error))
        stack = "".join(_users_stack(frame))
        info["traceback"] += f"\n\nIt cannot get out: cleanup on its way is still running:\n{stack}".rstrip()
        info["at"] = self._seen_at
        self._channel.send(("error", info))


def _users_stack(frame: FrameType | None) -> list[str]:
    summary = [] if frame is None else traceback.extract_stack(frame)
    names = [entry.filename for entry in summary]
    # The frames above the user's function are this package's worker and the interpreter's start.
    first = max((index + 1 for index, name in enumerate(names) if name == WORKER_FILE), default=0)
    return traceback.format_list(summary[first:])


def _handled_exception(thread: int) -> BaseException | None:
    with paused_collection():
        found = sys._current_exceptions().get(thread)
    # Before Python 3.12 it is what sys.exc_info() returns.
    return found[1] if isinstance(found, tuple) else found


def is_in_flight(error: BaseException, frame: FrameType | None) -> bool:
    """Tell whether an exception that a thread holds will propagate when the running cleanup ends.

    Args:
        error: The exception.
        frame: The innermost frame of the thread.

    Returns:
        True where its holder runs a `finally` or the exit of a `with`; False in an `except` block, or without source
        code.
    """
    trace = error.__traceback__
    while frame is not None and trace is not None:
        if frame is trace.tb_frame:
            return _is_in_cleanup(frame, trace)
        frame = frame.f_back
    return False


def _is_in_cleanup(frame: FrameType, trace: TracebackType) -> bool:
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        with paused_collection():
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, SystemError):
        # Python up to 3.12 raises the last one where another thread parses at the same time (gh-106905).
        return False
    raised, now = trace.tb_lineno, frame.f_lineno
    in_cleanup = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Try | ast.TryStar):
            if _covers(node.body, raised) and any(_covers(handler.body, now) for handler in node.handlers):
                return False
            guarded = [*node.body, *node.handlers, *node.orelse]
            in_cleanup = in_cleanup or (_covers(guarded, raised) and _covers(node.finalbody, now))
        elif isinstance(node, ast.With | ast.AsyncWith):
            header = node.lineno <= now < node.body[0].lineno
            in_cleanup = in_cleanup or (header and _covers(node.body, raised))
    return in_cleanup


def _covers(statements: list[ast.stmt] | list[ast.stmt | ast.ExceptHandler], line: int) -> bool:
    return bool(statements) and statements[0].lineno <= line <= (statements[-1].end_lineno or 0)
