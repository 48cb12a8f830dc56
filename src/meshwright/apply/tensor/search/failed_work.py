"""Work of a search, counted in functions that its failed proofs ran: the same on every machine, and for tensors of every size.

A proof of a pair around a whole model runs all of it, so that a limit in proofs alone bounds no time. Proofs that come to
something are as many as there are layers, and have no limit.
"""

from __future__ import annotations

from meshwright.apply.tensor.search.trace import Trace

__all__: list[str] = []

PAIR_WORK = 10_000
"""Functions that the proofs of one pair may run in a large scope before it is given up, in one run each [count]."""

LEAST_TRIALS = 12
"""Proofs of one pair that are made in a scope of any size [count]."""

MAX_WORK = 50_000
"""Functions that all failed proofs may run, in one run each, before pairs that are not proven are left [count]."""


class FailedWork:
    """The work of a search.

    Args:
        trace: The trace, which knows the functions of each module.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.done = 0
        """Functions that failed proofs have run [count]."""

    def add_failed(self, scope: str) -> None:
        """Count a proof in a scope that came to nothing."""
        self.done += self._trace.work_of(scope)

    @property
    def is_spent(self) -> bool:
        """Whether failed proofs have run all that they may."""
        return self.done >= MAX_WORK

    def most_trials(self, scope: str) -> int:
        """Return how many proofs a pair may have in a scope [count]."""
        return max(LEAST_TRIALS, PAIR_WORK // max(1, self._trace.work_of(scope)))

    def why_spent(self) -> str:
        """Return why a pair is not tried any more."""
        return (
            f"before this pair, proofs that failed had run {self.done} functions, and the search ends after {MAX_WORK}"
        )
