"""Pace of the ranks: how long their steps take, and from when on a wait is longer than steps explain."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Final

from meshwright.ranks.heartbeat import Beat

__all__: list[str] = []

LEAST_S: Final = 5.0
"""A wait that is shorter says nothing: a collection of memory, a slow disk, a busy machine [s]."""

TIMES_A_STEP: Final = 5.0
"""How many of the slowest steps a wait may last [ratio]."""

LEAST_STEPS: Final = 20
"""Steps before there is a pace: the first ones compile, search and load [count]."""

_MOST_STEPS: Final = 200
_PERCENTILE: Final = 0.99


class Pace:
    """The time that steps of the ranks take, from their records.

    Args:
        num_ranks: Ranks [count].
    """

    def __init__(self, num_ranks: int) -> None:
        self._steps = [-1] * num_ranks
        self._begun_at = [0.0] * num_ranks
        self._step_s: collections.deque[float] = collections.deque(maxlen=_MOST_STEPS)
        self._told_since = 0.0

    @property
    def limit_s(self) -> float:
        """How long a wait may last before it is remarkable [s]; infinite while there is no pace."""
        if len(self._step_s) < LEAST_STEPS:
            return math.inf
        ordered = sorted(self._step_s)
        return max(LEAST_S, TIMES_A_STEP * ordered[int(_PERCENTILE * (len(ordered) - 1))])

    def note(self, beats: Sequence[Beat], now: float) -> None:
        """Take the ranks' records of this moment.

        Args:
            beats: One a rank.
            now: The time, `time.monotonic()` [s].
        """
        for rank, beat in enumerate(beats):
            if beat.step == self._steps[rank]:
                continue
            if 0 <= self._steps[rank] < beat.step:
                num_steps = beat.step - self._steps[rank]
                self._step_s.append((now - self._begun_at[rank]) / num_steps)
            self._steps[rank], self._begun_at[rank] = beat.step, now

    def is_late(self, since: float, now: float) -> bool:
        """Tell, once for each wait, whether one that began at `since` is remarkable now [s]."""
        if since == self._told_since or now - since <= self.limit_s:
            return False
        self._told_since = since
        return True
