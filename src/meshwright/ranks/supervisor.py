"""Supervisor: starts ranks, watches them, decides which one is at fault, and leaves nothing behind.

Everything happens in the calling thread, in one loop over one selector: the ranks' channels, their process descriptors and a
socket for signals. Times are `time.monotonic()`, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from meshwright.errors import InternalError, StoppedOnRequest, UserCodeError
from meshwright.ranks import reaper
from meshwright.ranks.blame import Sign, death_error, guilty, summarise, template_error
from meshwright.ranks.channel import pack, read_result
from meshwright.ranks.error_transfer import rebuild_error
from meshwright.ranks.hang_report import STACK_SIGNAL, late_start_error, unheeded_stop_error
from meshwright.ranks.heartbeat import RECORD_BYTES, Beat, Board
from meshwright.ranks.processes import RankProcess, Reaper, rank_environment, scratch_file
from meshwright.ranks.signals import StopSignals
from meshwright.ranks.spawning import Spawner
from meshwright.ranks.waits import Waits

__all__: list[str] = []

# How long to wait for an earlier cause after the first sign: the first may be only "connection closed by peer".
_GRACE_S = 0.15
_GRACE_SECONDARY_S = 1.0
_TICK_S = 0.2
_QUICK_TICK_S = 0.02

_EXIT_PATIENCE_S = 10.0


class Supervisor:
    """The ranks of one group, as the launching process sees them; arguments as for `launch`."""

    def __init__(
        self,
        num_ranks: int,
        *,
        threads: int | None,
        timeout_s: float,
        start_timeout_s: float,
        stop_grace_s: float,
        env: dict[str, str] | None,
        on_event: Callable[[int, dict[str, Any]], None] | None,
    ) -> None:
        self.num_ranks = num_ranks
        self.run_id = secrets.token_hex(16)
        self.signals = StopSignals()
        self.is_closed = False
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._on_event = on_event
        self.on_beats: Callable[[list[Beat], list[int], float], None] | None = None
        self._owner = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RankProcess] = []
        self._signs: list[Sign] = []
        self._stopped: list[Sign] = []
        self._verdict_at = float("inf")
        self._is_leaving = False
        self._results: dict[int, Any] = {}
        self._stop_told: str | None = None
        self._stop_deadline: float | None = None
        self._directory: str | None = None
        self._reaper: Reaper | None = None
        self._spawner: Spawner | None = None
        self._descriptors = [scratch_file(num_ranks * RECORD_BYTES)]
        self._board = Board(self._descriptors[0], num_ranks)
        self._environment = rank_environment(self.run_id, threads, env)
        self._waits = Waits(self._ranks, self._board, timeout_s)
        self._threads = threads

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        return [rank.pid for rank in self._ranks]

    # -- start, call, close -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the ranks and wait until all have found each other."""
        try:
            with self.signals:
                self._spawn()
                deadline = time.monotonic() + self._start_timeout_s
                self._watch(lambda: all(rank.is_ready for rank in self._ranks), deadline)
        except BaseException:
            self.kill()
            raise

    def call(self, payload: bytes, main: str | None) -> list[Any]:
        """Have every rank make one call and return the results in rank order.

        Args:
            payload: The pickled (function, arguments).
            main: How to load the caller's main script where the call needs it, see `launch.py`.
        """
        if self.is_closed:
            raise InternalError("the ranks are gone: this group was closed, or failed before")
        self._results = {}
        for rank in self._ranks:
            rank.is_accounted = False
        self._stop_deadline = None
        self._waits.begin_call()
        packed = pack(("call", payload, main, self._stop_told is not None))
        try:
            with self.signals:
                for rank in self._ranks:
                    rank.channel.send(packed)
                    self._listen_for_room(rank)
                self._watch(lambda: len(self._results) == self.num_ranks, None)
        except BaseException:
            self.kill()
            raise
        if self._stopped:
            self.kill()
            raise guilty(self._stopped).error
        return [self._results[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Let the ranks exit by themselves, then make sure that nothing is left.

        A signal does not turn finished work into failed: a second SIGINT ends the waiting, and nothing else.
        """
        if self.is_closed:
            return
        self._is_leaving = True
        packed = pack(("exit",))
        deadline = time.monotonic() + _EXIT_PATIENCE_S
        with self.signals:
            try:
                for rank in self._ranks:
                    rank.channel.send(packed)
                    self._listen_for_room(rank)
                while time.monotonic() < deadline and any(rank.ending() is None for rank in self._ranks):
                    self._turn(_QUICK_TICK_S)
                    if self.signals.interrupted_again:
                        return  # nobody waits any longer; what the ranks were asked for is done
            finally:
                self.kill()

    def kill(self) -> None:
        """End every process of the run and free what it held. Safe to call at any time, and twice."""
        if self.is_closed or os.getpid() != self._owner:
            return
        self.is_closed = True
        with self.signals:  # an interrupt must not cut this short: the ranks would live on
            try:
                # The reaping process outlives the ranks, since PID 1 of a container may not reap the zombies it inherits.
                spared = set() if self._spawner is None else self._spawner.pids
                reaper.sweep(self.run_id, {rank.pid for rank in self._ranks if rank.is_born}, spared=spared)
                if self._spawner is not None:
                    self._spawner.end()
            finally:
                self._free()

    def _free(self) -> None:
        self._selector.close()
        for rank in self._ranks:
            rank.close()
        self._board.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self.signals.close()
        if self._reaper is not None:
            self._reaper.dismiss()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # -- starting ---------------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._selector.register(self.signals.wake_socket(), selectors.EVENT_READ, self._drain_wake)
        start = self._start_message()
        self._reaper = Reaper(self.run_id, self._directory)
        for number in range(self.num_ranks):
            rank = RankProcess(number, start)
            self._ranks.append(rank)
            self._selector.register(rank.channel, selectors.EVENT_READ, lambda rank=rank: self._hear(rank))
        self._spawner = Spawner(self._ranks, self._environment, self._descriptors, self._note_birth)
        self._spawner.begin(self._selector)

    def _note_birth(self, rank: RankProcess) -> None:
        if self._reaper is not None:
            self._reaper.tell(str(rank.pid))
        if rank.pidfd is not None:
            self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._look_at(rank))

    def _start_message(self) -> dict[str, Any]:
        if sys.platform == "linux":
            # Reopened through /proc by each rank: a store in memory, which leaves nothing on a disk.
            self._descriptors.append(scratch_file())
            store = f"/proc/self/fd/{self._descriptors[-1]}"
        else:
            self._directory = tempfile.mkdtemp(prefix="meshwright-")
            store = os.path.join(self._directory, "store")
        return {
            "world_size": self.num_ranks,
            "folder": _working_directory(),
            "sys_path": list(sys.path),
            "sys_argv": list(sys.argv),
            "store": store,
            "board": self._descriptors[0],
            "threads": self._threads,
            "timeout_s": self._waits.timeout_s,
            "start_timeout_s": self._start_timeout_s,
            "parent_pid": self._owner,
            # The kernel's parent-death signal follows the thread that started the child, not the process.
            "die_with_thread": threading.current_thread() is threading.main_thread(),
            "stack_signal": STACK_SIGNAL,
        }

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _watch(self, is_done: Callable[[], bool], deadline: float | None) -> None:
        """Run the loop until the work is done.

        Raises:
            BaseException: The error of the rank at fault, or KeyboardInterrupt at a second SIGINT.
        """
        while not is_done():
            self._turn(_QUICK_TICK_S if self._signs else _TICK_S)
            now = time.monotonic()
            self._heed_signals(now)
            self._find_hang(now)
            if deadline is not None and now > deadline:
                raise late_start_error(self._ranks, self._board, self._start_timeout_s)
            if self._stop_deadline is not None and now > self._stop_deadline:
                raise unheeded_stop_error(self._ranks, self._board, self._stop_told or "somebody", self._stop_grace_s)
            if self._signs and (now >= self._verdict_at or all(rank.is_accounted for rank in self._ranks)):
                raise self._verdict()

    def _turn(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if events & selectors.EVENT_WRITE:
                self._send_more(key.fileobj)
            if events & selectors.EVENT_READ:
                key.data()
        for rank in self._ranks:
            if rank.pidfd is None:
                self._look_at(rank)

    def _drain_wake(self) -> None:
        with contextlib.suppress(OSError):
            while self.signals.wake_socket().recv(64):
                pass

    def _listen_for_room(self, rank: RankProcess) -> None:
        if rank.channel.has_unsent:
            key = self._selector.get_key(rank.channel)
            self._selector.modify(rank.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, key.data)

    def _send_more(self, channel: Any) -> None:
        channel.flush()
        if not channel.has_unsent:
            self._selector.modify(channel, selectors.EVENT_READ, self._selector.get_key(channel).data)

    def _hear(self, rank: RankProcess) -> None:
        for message in rank.channel.receive():
            self._take(rank, message)
        if rank.channel.closed:
            # Its death, which says more, follows; if only the channel broke, `_look_at` waits for that too.
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.channel)

    def _take(self, rank: RankProcess, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == "result":
            self._take_result(rank, message[1])
        elif kind == "event":
            if self._on_event is not None:
                self._on_event(rank.rank, json.loads(message[1]))
        elif kind == "ready":
            rank.is_ready = True
        elif kind == "error":
            self._take_error(rank, message[1])
        elif kind == "stop":
            self._stop_asked_by(rank, message[1])
        else:
            self._take_unreadable(rank, message[1] if len(message) > 1 else kind)

    def _take_result(self, rank: RankProcess, packed: bytes) -> None:
        try:
            self._results[rank.rank] = read_result(packed)
        except Exception as error:  # noqa: BLE001 - rebuilding runs the classes' own code, which may raise anything
            self._take_unreadable(rank, f"{type(error).__name__}: {error}")
        else:
            rank.is_accounted = True

    def _take_unreadable(self, rank: RankProcess, reason: str) -> None:
        error = UserCodeError(
            f"rank {rank.rank} sent back a value that cannot be rebuilt here: {reason}",
            rank=rank.rank,
            fix="return plain data (numbers, text, lists, dicts, CPU tensors) from the function",
        )
        self._sign(rank, Sign(rank.rank, time.monotonic(), secondary=False, error=error))

    def _take_error(self, rank: RankProcess, info: dict[str, Any]) -> None:
        error = rebuild_error(info, rank.rank, self.num_ranks)
        sign = Sign(rank.rank, info["at"], secondary=info["secondary"], error=error)
        if isinstance(error, StoppedOnRequest):
            # Not a failure: the other ranks end in the same way, and may still be writing.
            self._results[rank.rank] = None
            self._stopped.append(sign)
            rank.is_accounted = True
        else:
            self._sign(rank, sign)

    def _sign(self, rank: RankProcess, sign: Sign) -> None:
        rank.is_accounted = True
        self._signs.append(sign)
        grace = _GRACE_SECONDARY_S if sign.secondary else _GRACE_S
        self._verdict_at = min(self._verdict_at, time.monotonic() + grace)

    def _look_at(self, rank: RankProcess) -> None:
        ending = None if rank.has_died else rank.ending()
        if ending is None:
            return
        rank.has_died = True
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
        self._hear(rank)  # what it said before it died
        if self._is_leaving:
            return
        template = None if self._spawner is None else self._spawner.lost
        if template is not None:
            error = template_error(rank.rank, self.num_ranks, template.pid, template.how_it_ended())
        else:
            error = death_error(
                rank.rank,
                self.num_ranks,
                rank.pid,
                signal_number=ending[0],
                status=ending[1],
                beat=self._board.read(rank.rank),
            )
        self._sign(rank, Sign(rank.rank, time.monotonic(), secondary=False, error=error))

    # -- what goes wrong --------------------------------------------------------------------------------------------

    def _verdict(self) -> BaseException:
        error = guilty(self._signs).error
        remark = summarise(self._signs)
        if remark:
            error.add_note(remark)
        return error

    def _heed_signals(self, now: float) -> None:
        if self.signals.interrupted_again:
            raise KeyboardInterrupt
        if self.signals.first is not None and self._stop_deadline is None:
            self._tell_stop(self.signals.first)
            self._stop_deadline = now + self._stop_grace_s

    def _stop_asked_by(self, rank: RankProcess, signal_name: str | None) -> None:
        """Tell all ranks that one was asked to stop: by a signal, which sets the deadline, or by its own code, which does not."""
        self._tell_stop(f"rank {rank.rank}" if signal_name is None else f"{signal_name} at rank {rank.rank}")
        if signal_name is not None and self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + self._stop_grace_s

    def _tell_stop(self, name: str) -> None:
        if self._stop_told is not None:
            return
        self._stop_told = name
        packed = pack(("stop",))
        for rank in self._ranks:
            rank.channel.send(packed)
            self._listen_for_room(rank)

    def _find_hang(self, now: float) -> None:
        if self._signs:
            return
        found = self._waits.look(now)
        if self.on_beats is not None:
            self.on_beats(self._waits.beats, self.pids, self._waits.limit_s)
        if found is not None:
            number, error = found
            self._sign(self._ranks[number], Sign(number, now, secondary=False, error=error))


def _working_directory() -> str | None:
    """Return this process's working directory; None where that was removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return None
