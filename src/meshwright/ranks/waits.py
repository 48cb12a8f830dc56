"""Waits of launched ranks: which are longer than steps explain, and which end a run."""

from __future__ import annotations

import logging
import math
from typing import Final

from meshwright.errors import LostPeerError
from meshwright.ranks.hang_report import hang_error, lines_about, standstill_error, stopped_ranks
from meshwright.ranks.heartbeat import Beat, Board
from meshwright.ranks.pace import TIMES_A_STEP, Pace
from meshwright.ranks.processes import RankProcess

__all__: list[str] = []

_LONG_PHASES: Final = frozenset(
    {"start", "import", "join", "run", "idle", "build", "data", "resume", "evaluate", "save", "end"}
)
"""Phases that take as long as they take: no step tells how long."""

_MOST_BETWEEN_LOOKS_S: Final = 1.0

_log = logging.getLogger(__name__)


class Waits:
    """The waits of one group of ranks.

    Args:
        ranks: All ranks; filled later.
        board: Their records.
        timeout_s: How long a rank may wait in one exchange [s].
    """

    def __init__(self, ranks: list[RankProcess], board: Board, timeout_s: float) -> None:
        self._ranks = ranks
        self._board = board
        self.timeout_s = timeout_s
        self._pace = Pace(board.num_ranks)
        self._still_since = math.inf
        self._still_s = 0.0
        self._stopped_s = 0.0
        self._looked_at = 0.0
        self.beats: list[Beat] = []
        """What each rank was doing at the last look."""

    @property
    def limit_s(self) -> float:
        """How long a wait may last before it is told [s]; infinite while no steps say it."""
        return self._pace.limit_s

    def begin_call(self) -> None:
        """Forget the pace of the call before: another one may take other steps."""
        self._pace = Pace(self._board.num_ranks)

    def look(self, now: float) -> tuple[int, LostPeerError] | None:
        """Return the rank that has waited beyond the limit, and the error for it; None where none has.

        A wait that is only remarkable is told as a warning, once. So is that no rank comes on and none waits for another: a
        plan of one process whose data never come, for example. Where steps have told their length, or all ranks are stopped, it
        ends the run at the limit of an exchange.

        Args:
            now: The time, `time.monotonic()` [s].
        """
        beats = self.beats = [self._board.read(number) for number in range(self._board.num_ranks)]
        self._pace.note(beats, now)
        since, number = min((beat.waiting_since or math.inf, number) for number, beat in enumerate(beats))
        if self._pace.is_late(since, now):
            late = hang_error(self._ranks, self._board, number, now, self.timeout_s, goes_on=True)
            _log.warning("slower than %d of its steps: %s", TIMES_A_STEP, late.message)
        elif since == math.inf and self._pace.is_late(_last_progress(beats), now):
            lines = "\n".join(lines_about(self._ranks, self._board, goes_on=True))
            quiet_s = now - _last_progress(beats)
            _log.warning("no rank has come on for %.1f s, longer than %d steps:\n%s", quiet_s, TIMES_A_STEP, lines)
        if now - since > self.timeout_s:
            return number, hang_error(self._ranks, self._board, number, now, self.timeout_s)
        looked_s = min(now - self._looked_at, _MOST_BETWEEN_LOOKS_S)  # a time without looks, suspended, hardly counts
        self._looked_at = now
        all_stopped_s = self._all_stopped_s(looked_s, now)
        still_s = self._stood_still_s(_last_progress(beats), looked_s) if since == math.inf else 0.0
        if still_s > max(self.timeout_s, self.limit_s) or all_stopped_s > self.timeout_s:
            number = min(range(len(beats)), key=lambda rank: beats[rank].progress_at)
            return number, standstill_error(self._ranks, self._board, number, now, self.timeout_s)
        return None

    def _stood_still_s(self, since: float, looked_s: float) -> float:
        """Return for how long looks have found that no rank comes on [s].

        Args:
            since: When a rank has begun something last; infinity where that says nothing [s].
            looked_s: Time since the last look [s].
        """
        if since != self._still_since or since == math.inf:
            self._still_since, self._still_s = since, 0.0
        else:
            self._still_s += looked_s
        return self._still_s

    def _all_stopped_s(self, looked_s: float, now: float) -> float:
        """Return for how long looks have found every rank stopped that is in the call, whatever its phase: no peer waits [s]."""
        quiet_s = now - max(beat.progress_at for beat in self.beats)
        at_work = [rank for rank in self._ranks if not rank.has_died and self.beats[rank.rank].phase != "idle"]
        is_stopped = quiet_s > _MOST_BETWEEN_LOOKS_S and 0 < len(at_work) == len(stopped_ranks(at_work))
        self._stopped_s = self._stopped_s + looked_s if is_stopped else 0.0
        return self._stopped_s


def _last_progress(beats: list[Beat]) -> float:
    """Return when a rank last began something; infinity where one does what no step tells the length of."""
    if any(beat.phase in _LONG_PHASES for beat in beats):
        return math.inf
    return max(beat.progress_at for beat in beats)
