"""Watch of joined ranks, which no launching process sees together.

Each rank tells the job's store several times a second that it lives, where it is, and what it waits for. One that waits for too
long, or whose exchange has failed, reads what the others have told, twice, and so finds which of them is silent, and which works.
The ranks' clocks are not compared: a rank tells how long it has waited, and counts what it tells.
That a process has ended is seen by the other ranks of its host in the same moment, and told to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshwright.host import is_running, resident_bytes
from meshwright.ranks.agent import end_this_rank
from meshwright.ranks.heartbeat import RECORD_BYTES, Board, Pulse
from meshwright.ranks.neighbours import Neighbours
from meshwright.ranks.pace import TIMES_A_STEP, Pace
from meshwright.ranks.processes import scratch_file
from meshwright.ranks.store_connections import StoreGuard
from meshwright.ranks.told import Missing, Told
from meshwright.spec.rank_states import RankActivity

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

__all__: list[str] = []

_PERIOD_S = 0.25
_RANKS_A_PERIOD = 64
"""The store serves one rank after another: with more ranks, each tells less often [count]."""
_SILENT_PERIODS = 3.0
"""How long a rank that lives may tell nothing new, on a busy machine [periods]."""
_UNREACHABLE_S = 3.0
"""From when on a store that has not answered counts as out of reach [s]."""
_STATES_S = 1.0
_LOOK_S = 0.05
_ASK_S = 0.02
_GIVEN_UP_PATIENCE_S = 1.0
"""How long a rank may take to end once the others have left it: there is nothing that it could save without them [s]."""
_SILENT_S = 2.0
_MOST_TEXT = 200
_FAILED = "an exchange that has failed"
FAILURE_KEY = "failure"
"""Where a rank tells why it fails, or who is missing."""
_ENDED_KEY = "ended"
"""Which rank's process was the first to end without a word."""
HEARD_KEY = "heard"
"""Before the number of a rank that has read that it was given up; the store may end once all have."""
HOST_KEY = "here"
"""Before the rank's number: where it says its host's name as it comes."""

_log = logging.getLogger(__name__)


class JoinedWatch:
    """The watch of one rank.

    Args:
        store: The job's store, as a client of its own: another thread's answers must not wait for this one's.
        rank: This rank.
        world_size: Ranks [count].
        neighbours: Ranks that may be of this host.
        guarded: The store's address, and for how long it may answer nothing before this process's connections to it are shut
            down [s]; None leaves them.
        store_rank: The rank whose process holds the store; None where that is no rank's.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        neighbours: Sequence[int] = (),
        *,
        guarded: tuple[str, int, float] | None = None,
        store_rank: int | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.period_s = _PERIOD_S * max(1.0, world_size / _RANKS_A_PERIOD)
        descriptor = scratch_file(RECORD_BYTES)
        self._board = Board(descriptor, 1)
        os.close(descriptor)
        self.pulse = Pulse(self._board, 0)
        """Where this rank notes its steps and waits."""
        self.has_given_up: Callable[[], bool] = lambda: False
        """Tells whether an exchange has failed here: this rank waits no more, and is not the one that others wait for."""
        self.has_news = False
        """Whether a rank has told of its failure, or of one that is missing."""
        self.on_states: Callable[[Sequence[RankActivity], float], None] | None = None
        """Told about once a second what all ranks do, and from when on a wait is remarkable [s]; for one rank of the job."""
        self._states_at = 0.0
        self._seen: dict[int, tuple[int, float]] = {}
        """Rank -> the count that it told last, and when that was new here."""
        self._pace = Pace(1)
        self._hosts: dict[int, str] = {}
        self._neighbours = Neighbours(store, rank, neighbours)
        self._count = 0
        self._answered_at = time.monotonic()
        self._is_lost = False
        self._store_rank = store_rank
        self._guard = None if guarded is None else StoreGuard(*guarded, lambda: self._answered_at)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-joined-watch", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()
        if self._guard is not None:
            self._guard.start()

    def stop(self, end: str = "has left", missing: Sequence[int] = ()) -> None:
        """Tell for the last time, and end.

        Args:
            end: Why nothing more comes.
            missing: Ranks that this one has found missing. Those that live are ended: nobody waits for them any more.
        """
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._guard is not None:
            self._guard.stop()
        self._neighbours.wake()
        self._thread.join(2 * self.period_s)
        if not self._thread.is_alive():
            self._neighbours.close()
        if not self._is_lost and not self._thread.is_alive():  # else it waits for a store that is out of reach
            with contextlib.suppress(RuntimeError):
                self._tell(end, missing[0] if missing else None)
                for rank in missing:
                    self._store.set(f"given up/{rank}", str(self._rank))

    def find_missing(self) -> Missing:
        """Return which ranks an exchange that has failed here lacks. Takes a second at most, longer where there is no store.

        The first whose process has ended without a word comes first; then ranks that tell nothing more, those that others have
        found, those that have left without a reason, and those that are in no exchange. None, where a rank has told of its
        failure meanwhile.
        """
        if (lost := self.store_is_lost()) is not None:
            return lost
        try:
            before = self._read_all()
            after, silent = self._read_again(before)
            ended = self._first_ended()
        except (RuntimeError, ValueError, TypeError, KeyError):
            return self._no_store()
        if ended is None and self._store.check([FAILURE_KEY]):
            return Missing((), "")
        left, working, lines = [], [], []
        for rank, told in after.items():
            if rank == ended:
                state = "has ended without a word: it was killed, or its process was left"
            elif told.end:
                state = told.end
                if told.peer is None:
                    left.append(rank)
            elif rank in silent:
                state = "gives no sign of life: it was killed or stopped, or its host cannot be reached"
            elif told.exchange == _FAILED:
                state = "has waited in an exchange that has failed"
            elif not told.exchange:
                state = "is in no exchange"
                working.append(rank)
            else:
                state = f"waits in {told.exchange} for {told.waiting_s:.1f} s"
            lines.append(f"  rank {rank}{self._host_of(rank)} {state}; {told.where()}")
        found = [ended] if ended is not None else silent or self._found_by_others(after) or left or working
        silent = [] if ended is not None else silent
        return Missing(tuple(found), "\n".join(lines), tuple(silent), tuple(working) if found == working else ())

    def end_stuck(self, rank: int) -> None:
        """Kill a missing rank of this host that gives no sign of life: stopped or held in C code, it cannot end itself."""
        if not self._neighbours.knows(rank):
            return
        before = told = None
        with contextlib.suppress(RuntimeError, ValueError, TypeError, KeyError):
            before = self._told(rank)
        if self._is_over.wait(_SILENT_PERIODS * self.period_s):
            return
        # The store may have gone with its host's agent: then nobody tells anything, and who could leave has left.
        with contextlib.suppress(RuntimeError, ValueError, TypeError, KeyError):
            told = self._told(rank)
        if told is None or (before is not None and not told.end and told.count == before.count):
            self._neighbours.kill(rank)

    def end_store_rank(self) -> None:
        """Kill the rank that holds the store, which is out of reach, where that rank is of this host and lives."""
        rank, answered_at = self._store_rank, self._answered_at
        has_shut = self._guard is not None and self._guard.has_shut
        if rank is None or not self._neighbours.knows(rank) or (self._is_lost and not has_shut):
            return
        if not self._is_over.wait(_SILENT_PERIODS * self.period_s) and self._answered_at == answered_at:
            self._neighbours.kill(rank)

    def await_end(self, rank: int, limit_s: float) -> None:
        """Wait until a rank's process has ended, where that is of this host.

        torchrun takes the first rank that ends for the cause: whoever was told of another one's error lets that end first.

        Args:
            rank: The rank.
            limit_s: How long to wait [s].
        """
        with contextlib.suppress(RuntimeError, ValueError, TypeError, KeyError):
            told = self._read_all().get(rank)
            if told is None or self._host_of(rank) != self._host_of(self._rank):
                return
            deadline = time.monotonic() + limit_s
            while is_running(told.pid) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if self._count == 0:
                    self._neighbours.tell()
                for rank in self._neighbours.find():
                    self._tell_end_of(rank)
                if self._pause():
                    return
                if self._tell():
                    break
            except RuntimeError:
                self._is_lost = True  # the store is gone, or its connection was lost: it answers no more
                return
            now = time.monotonic()
            self._warn_if_late(now)
            if self.on_states is not None and now - self._states_at >= max(_STATES_S, 4 * self.period_s):
                self._states_at = now
                with contextlib.suppress(RuntimeError, ValueError, TypeError, KeyError):
                    self.on_states(self.activities(now), self._pace.limit_s)
        end_this_rank(f"another rank has waited for rank {self._rank} in vain, and has left", _GIVEN_UP_PATIENCE_S)

    def _pause(self) -> bool:
        """Wait until it is time to tell again, and tell of neighbours that end meanwhile; return whether this watch is over."""
        until = time.monotonic() + self.period_s
        while not self._is_over.is_set() and (left_s := until - time.monotonic()) > 0:
            if not self._neighbours.sees:
                return self._is_over.wait(left_s)
            for rank in self._neighbours.look(left_s):
                self._tell_end_of(rank)
        return self._is_over.is_set()

    def _tell_end_of(self, rank: int) -> None:
        """Tell that a rank's process has ended, where it has not said why itself."""
        if not (self._store.check([f"told/{rank}"]) and self._told(rank).end):
            self._store.compare_set(_ENDED_KEY, "", str(rank))

    def _tell(self, end: str = "", peer: int | None = None) -> bool:
        """Tell what this rank does; return whether others have given it up."""
        beat = self._board.read(0)
        self._count += 1
        waiting_s = time.monotonic() - beat.waiting_since if beat.is_waiting else 0.0
        exchange = _FAILED if self.has_given_up() else beat.collective
        told = Told(
            count=self._count,
            step=beat.step,
            phase=beat.phase,
            exchange=exchange,
            waiting_s=waiting_s,
            end=end,
            peer=peer,
            pid=os.getpid(),
            rss_bytes=resident_bytes(),
            progress_s=time.monotonic() - beat.progress_at,
            num_waits=beat.num_entered,
        )
        self._store.set(f"told/{self._rank}", json.dumps(dataclasses.astuple(told)))
        is_given_up = self._store.check([f"given up/{self._rank}"])  # an answer, which `set` does not wait for
        if is_given_up:
            self._store.set(f"{HEARD_KEY}/{self._rank}", "")
        self.has_news = self._store.check([FAILURE_KEY])
        self._answered_at = time.monotonic()
        return is_given_up

    def _warn_if_late(self, now: float) -> None:
        beat = self._board.read(0)
        self._pace.note([beat], now)
        if not self._pace.is_late(beat.waiting_since or float("inf"), now):
            return
        missing = self.find_missing()
        if not self._board.read(0).is_waiting or self._is_over.is_set():
            return
        _log.warning(
            "rank %d of %d has waited %.1f s in %s at %s, longer than %d of its steps:\n%s",
            *(self._rank, self._world_size, now - beat.waiting_since, beat.collective, beat.where()),
            *(TIMES_A_STEP, missing.text),
        )

    # -- what all do, for those who watch ---------------------------------------------------------------------------

    def activities(self, now: float) -> list[RankActivity]:
        """Return what each rank has told last; of those that tell nothing more, that.

        Args:
            now: The time, `time.monotonic()` [s].
        """
        told = self._read_all(with_this=True)
        return [self._activity(rank, told.get(rank), now) for rank in range(self._world_size)]

    def _activity(self, rank: int, told: Told | None, now: float) -> RankActivity:
        if told is None:
            told = Told(0, -1, "start", "", 0.0, "", None, 0, 0, 0.0, 0)
        count, since = self._seen.get(rank, (-1, now))
        if told.count != count:
            since = now
            self._seen[rank] = (told.count, since)
        phase, is_waiting, silent_s = told.phase, bool(told.exchange) and not told.end, now - since
        if told.end:
            phase = told.end
        elif silent_s > max(_SILENT_S, 2 * _SILENT_PERIODS * self.period_s):
            phase, is_waiting = f"{phase}, no sign of life", False
        here, host = self._host_of(self._rank), self._host_of(rank)
        return RankActivity(
            pid=told.pid,
            step=told.step,
            phase=phase[:_MOST_TEXT],
            progress_s=max(0.0, told.progress_s) + silent_s,
            wait_s=told.waiting_s if is_waiting else None,
            collective=told.exchange if is_waiting else "",
            num_waits=told.num_waits,
            rss_bytes=told.rss_bytes,
            host="" if host == here else host.removeprefix(" on ")[:_MOST_TEXT],
        )

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read_all(self, *, with_this: bool = False) -> dict[int, Told]:
        found = {}
        for rank in range(self._world_size):
            if (with_this or rank != self._rank) and self._store.check([f"told/{rank}"]):
                found[rank] = self._told(rank)
        self._answered_at = time.monotonic()
        return found

    def _read_again(self, before: dict[int, Told]) -> tuple[dict[int, Told], list[int]]:
        """Return what the others have told some time later, and which of them tell nothing more.

        It is read at once where the cause is known: a process has ended, a rank has told of its failure, or one has left without
        a reason and all others live.
        """
        silent = {rank for rank, told in before.items() if not told.end}
        is_left = any(told.end and told.peer is None for told in before.values())
        until = time.monotonic() + _SILENT_PERIODS * self.period_s
        while time.monotonic() < until and not self._is_over.wait(_ASK_S):
            if self._store.check([_ENDED_KEY]) or self._store.check([FAILURE_KEY]):
                silent.clear()
                break
            for rank in tuple(silent):
                told = self._told(rank)
                if told.end or told.count != before[rank].count:
                    silent.remove(rank)
                is_left |= bool(told.end) and told.peer is None
            if is_left and not silent:
                break
        return self._read_all(), sorted(silent)

    def _told(self, rank: int) -> Told:
        return Told(*json.loads(self._store.get(f"told/{rank}")))

    def _first_ended(self) -> int | None:
        """Return the first rank whose process has ended without a word."""
        return int(self._store.get(_ENDED_KEY)) if self._store.check([_ENDED_KEY]) else None

    def _found_by_others(self, told: dict[int, Told]) -> list[int]:
        """Return the rank that others have found at fault before they left, and that has not said why itself."""
        peers = {each.peer for each in told.values() if each.end and each.peer is not None}
        return sorted(peer for peer in peers if peer != self._rank)

    def store_is_lost(self) -> Missing | None:
        """Return that the store is out of reach, or gone; None while it answers."""
        silent_s = time.monotonic() - self._answered_at
        return None if silent_s < _UNREACHABLE_S and self._thread.is_alive() else self._no_store()

    def _no_store(self) -> Missing:
        silent_s = time.monotonic() - self._answered_at
        text = f"  the job's store, on rank 0's host, has not answered for {silent_s:.1f} s"
        return Missing((0,) if self._rank else (), text)

    def _host_of(self, rank: int) -> str:
        """Return " on HOST", as the rank has called it when it came; "" where it has not."""
        if rank not in self._hosts:
            with contextlib.suppress(RuntimeError):
                if self._store.check([f"{HOST_KEY}/{rank}"]):
                    self._hosts[rank] = f" on {self._store.get(f'{HOST_KEY}/{rank}').decode(errors='replace')}"
        return self._hosts.get(rank, "")
