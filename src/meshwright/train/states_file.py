"""Writer of `ranks.json`: what ranks do, once a second, by the launching process or a job's rank 0. Never imports torch."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from meshwright.ranks.heartbeat import Beat
from meshwright.spec.rank_states import STATES_FILE, RankActivity, RankStates

__all__: list[str] = []

EVERY_S: Final = 1.0


class StatesFile:
    """Writes the ranks' states into a run's folder.

    A disk that is full or gone is passed over: nothing that trains needs this file.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATES_FILE
        self._partial = folder / f".{STATES_FILE}.partial"
        self._written_at = -math.inf

    def note(self, beats: Sequence[Beat], pids: Sequence[int], limit_s: float) -> None:
        """Take the ranks' records of this moment.

        Args:
            beats: One a rank.
            pids: Their processes.
            limit_s: A wait beyond this is remarkable; infinite while nothing is known [s].
        """
        now = time.monotonic()
        if now - self._written_at < EVERY_S:
            return
        self._written_at = now
        ranks = [
            RankActivity(
                pid=pid,
                step=max(beat.step - 1, -1) if beat.phase else -1,  # a training run counts from 1
                phase=beat.phase or "start",
                progress_s=max(0.0, now - (beat.progress_at or now)),  # 0: it has not told any yet
                wait_s=max(0.0, now - beat.waiting_since) if beat.is_waiting else None,
                collective=beat.collective,
                num_waits=beat.num_entered,
                rss_bytes=beat.rss_bytes,
            )
            for beat, pid in zip(beats, pids, strict=True)
        ]
        self.write(ranks, limit_s)

    def write(self, ranks: Sequence[RankActivity], limit_s: float) -> None:
        """Write what the ranks do.

        Args:
            ranks: What each does.
            limit_s: A wait beyond this is remarkable; infinite while nothing is known [s].
        """
        limit = limit_s if math.isfinite(limit_s) else None
        states = RankStates(written_at=time.time(), limit_s=limit, ranks=tuple(ranks))
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._partial, flags, 0o644), "w", encoding="utf-8") as file:
                file.write(states.to_json())
            self._partial.replace(self._path)

    def remove(self) -> None:
        """Remove what a former run has left."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
