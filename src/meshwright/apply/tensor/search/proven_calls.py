"""Calls under which the cuts of a part are proven, found once the layout is: their digests, and which sizes and values count.

What runs with other sizes show in one mode holds in the other, where the same functions give the same sizes there.
"""

from __future__ import annotations

from typing import Any

from meshwright.apply.modules.modes import set_flags
from meshwright.apply.tensor.guards.asked import Followed
from meshwright.apply.tensor.guards.described import digest
from meshwright.apply.tensor.guards.signatures import Kind, describe_structure, names_of_sizes, proven_digests
from meshwright.apply.tensor.proof.place_reads import PlaceReads
from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.proof.scope_values import LastDrawn, ScopeValues
from meshwright.apply.tensor.search.fewer_rows import experiment_with_fewer_rows
from meshwright.apply.tensor.search.narrowing import narrow
from meshwright.apply.tensor.search.regions import Proving
from meshwright.apply.tensor.search.trace import Call, Trace

__all__: list[str] = []


class ProvenCalls:
    """Finds the digests of the calls of parts.

    Args:
        trace: The trace, with the model.
        proving: What was proven.
        num_tp_ranks: Ranks [count].
        drawn: Values of the scope that was tried last.
    """

    def __init__(self, trace: Trace, proving: Proving, num_tp_ranks: int, drawn: LastDrawn) -> None:
        self._trace = trace
        self._model = trace.module
        self._proving = proving
        self._num_tp_ranks = num_tp_ranks
        self._drawn = drawn
        self._followed: dict[tuple[str, int], Followed | None] = {}  # by part and place of the call

    def of(self, name: str, *, resizes: bool = False) -> tuple[str, ...]:
        """Return digests of the structures and calls of a module under which its cuts were proven (`part_guard.py`).

        Args:
            name: The module.
            resizes: Whether a region in it translates sizes to shards'.
        """
        self._proving.check_deadline()
        module = self._model.get_submodule(name)
        flags = [child.training for child in module.modules()]
        found: dict[str, None] = {}
        structures: set[str] = set()
        for mode in (None, True, False):
            if mode is not None:
                set_flags([(child, mode) for child in module.modules()])
            structure = digest(describe_structure(module))
            if structure in structures:
                continue  # the traced modes, already done
            structures.add(structure)
            for place, call in enumerate(self._trace.distinct.get(name, {}).values()):
                kind, is_same = self._kind_of(name, call, place, resizes=resizes, tried=("asks", place, mode, resizes))
                found |= dict.fromkeys(
                    proven_digests(
                        structure,
                        call.args,
                        call.kwargs,
                        kind=kind,
                        ambient=call.ambient,
                        without_gradients=is_same,
                    )
                )
        for child, flag in zip(module.modules(), flags, strict=True):
            child.training = flag
        return tuple(found)

    def _kind_of(
        self, name: str, call: Call, place: int, *, resizes: bool, tried: tuple[Any, ...]
    ) -> tuple[Kind, bool]:
        """Return which sizes and values could run other code, and whether none do without gradients.

        Args:
            name: The module.
            call: Its call.
            place: Which one of its calls.
            resizes: As for `of`.
            tried: Which call it is, and in which mode.
        """
        names = names_of_sizes(call.args, call.kwargs)
        asked = self._proving.passed_on.find(tried, name)
        if asked is None:
            module = self._model.get_submodule(name)
            reads = PlaceReads(module)
            try:
                narrowed = narrow(module, [call], self._num_tp_ranks)
                own, given = (module, call) if narrowed is None else (narrowed.module, narrowed.calls[0])
                values = ScopeValues(own, self._drawn)
                with reads.watched():
                    few = experiment_with_fewer_rows(own, given, self._num_tp_ranks, values, only_asks=True)
                    experiment = Experiment(own, given, self._num_tp_ranks, values=values, only_asks=True)
                    asked = experiment.asks(few, self._followed.get((name, place)), resizes=resizes)
                    self._followed[name, place] = asked.followed
            except Exception:  # noqa: BLE001 - whatever the user's code raises; then everything counts
                return (tuple(names.values()), 2), False
            asked = (asked.sizes, asked.values, asked.is_same)
            self._proving.passed_on.keep(tried, name, asked, reads)
        sizes, values, is_same = asked
        return (tuple(name for size, name in names.items() if size in sizes), values), is_same
