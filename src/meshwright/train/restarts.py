"""Restarts of ranks that were lost: after which errors, how often, and after what pause."""

from __future__ import annotations

import collections
import dataclasses
import select

from meshwright.errors import (
    LostPeerError,
    UserCodeError,
    WorkerKilledError,
    exit_code_of,
)
from meshwright.ranks.signals import StopSignals

__all__: list[str] = []

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_MOST_TOLD = 200
SAME_CAUSE = 3
"""How often one cause may stop a run at one step; then it is no accident [count]."""


@dataclasses.dataclass(frozen=True, slots=True)
class RestartDecision:
    """What is done about a failure."""

    pause_s: float | None
    """How long to wait before the restart; None: there is none [s]."""
    reason: str = ""
    """Why there is none, where that is not plain from the error."""


class Restarts:
    """Decides about the restarts of one run.

    A rank that was killed or is gone is started again. An exception of the user's code is tried again where the run had come on
    since its start: a file system may answer next time. What is wrong with the configuration, the numbers, the disk or a
    checkpoint is still wrong after a restart, and what a person asked for is done.

    Args:
        most: Restarts in all [count].
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_done = 0
        """Restarts so far [count]."""
        self._seen: collections.Counter[tuple[str, str, int]] = collections.Counter()

    def after(self, error: BaseException, *, told: str, step: int, num_new_steps: int) -> RestartDecision:
        """Decide about a failure.

        Args:
            error: What the ranks ended of.
            told: What is told of it, on one line. Numbers in it (ranks, processes, times) differ from time to time and count
                for nothing.
            step: The last step that was done before it [count].
            num_new_steps: Steps done since the ranks were started [count].
        """
        if self.most == 0 or not _may_pass(error, num_new_steps):
            return RestartDecision(None)
        cause = (type(error).__name__, "".join(sign for sign in told if not sign.isdigit())[:_MOST_TOLD], step)
        self._seen[cause] += 1
        if self._seen[cause] >= SAME_CAUSE:
            return RestartDecision(
                None, f"no restart: the same cause has stopped it {SAME_CAUSE} times after step {step}"
            )
        if self.num_done >= self.most:
            return RestartDecision(None, f"no restart: train.max_restarts = {self.most} are used up")
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self.num_done)
        self.num_done += 1
        return RestartDecision(pause_s)


def wait(pause_s: float) -> bool:
    """Wait, and return whether a signal has asked to stop meanwhile; in that case at once."""
    with StopSignals() as signals:
        try:
            select.select([signals.wake_socket()], [], [], pause_s)
            return signals.first is not None
        finally:
            signals.close()


def _may_pass(error: BaseException, num_new_steps: int) -> bool:
    if isinstance(error, WorkerKilledError | LostPeerError):
        return True
    is_users = exit_code_of(error) == UserCodeError.exit_code
    return is_users and isinstance(error, Exception) and num_new_steps > 0
