"""Results of experiments that one scope passes on to its twins: equal layers are proven once.

Only results that were right are kept. What stands around a scope is not its own: who else uses its tensors is asked for each.
"""

from __future__ import annotations

from typing import Any

from meshwright.apply.tensor.proof.place_reads import PlaceReads
from meshwright.apply.tensor.proof.twins import Sameness, sameness
from meshwright.apply.tensor.search.trace import Trace

__all__: list[str] = []

_MAX_ASKED = 4
"""Earlier scopes that one is compared with for one result [count]."""


class PassedOn:
    """Results by what was tried, and in which scope.

    Args:
        trace: The trace, with the model and its calls.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._kept: dict[Any, list[tuple[str, Any, PlaceReads]]] = {}
        self._compared: dict[tuple[str, str], Sameness] = {}
        self.num_passed = 0
        """Results that were passed on [count]."""

    def keep(self, tried: Any, scope: str, result: Any, reads: PlaceReads) -> None:
        """Keep a result of experiments with a scope.

        Args:
            tried: What was tried, in names relative to the scope; hashable.
            scope: Name of the scope.
            result: Whatever the experiments gave, in such names, too.
            reads: What the experiments have read of positions.
        """
        self._kept.setdefault(tried, []).append((scope, result, reads))

    def find(self, tried: Any, scope: str) -> Any:
        """Return the result that the same trial would have here; None where no scope before is known to be the same."""
        for other, result, reads in self._kept.get(tried, [])[:_MAX_ASKED]:
            found = Sameness.SAME if other == scope else self._sameness(other, scope)
            if found is Sameness.SAME or (found is Sameness.BUT_PLACES and not reads.was_read):
                self.num_passed += 1
                return result
        return None

    def _sameness(self, one: str, other: str) -> Sameness:
        if (one, other) not in self._compared:
            model, calls = self._trace.module, self._trace.distinct
            mine, theirs = list(calls.get(one, {}).values()), list(calls.get(other, {}).values())
            try:
                found = sameness(model.get_submodule(one), mine, model.get_submodule(other), theirs)
            except Exception:  # noqa: BLE001 - whatever a user's object raises where it is looked into
                found = Sameness.DIFFERENT
            self._compared[one, other] = found
        return self._compared[one, other]
