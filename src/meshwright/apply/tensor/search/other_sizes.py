"""Ways that failed for a scope, which are not tried again in scopes of the same code whose tensors have other sizes.

A way is known by what it does with which tensors, and by how its units stand to the ranks and to the sizes of the scope: what
failed with one head for two ranks says nothing about two heads.
"""

from __future__ import annotations

from typing import Any

from meshwright.apply.randomness.names import series_of
from meshwright.apply.tensor.guards.described import class_name
from meshwright.apply.tensor.proof.shards_against_whole import Difference
from meshwright.apply.tensor.search.trace import Trace
from meshwright.apply.tensor.tensor_layout import Region

__all__: list[str] = []

ALWAYS_TRIED = 12
"""Ways that are tried in each scope, whatever failed before: code may know where it stands [count]."""


class OtherSizes:
    """Failed ways by the code of their scope.

    Args:
        trace: The trace, with the model.
        num_tp_ranks: Ranks [count].
    """

    def __init__(self, trace: Trace, num_tp_ranks: int) -> None:
        self._model = trace.module
        self._num_tp_ranks = num_tp_ranks
        self._reasons: dict[Any, Difference] = {}
        self._codes: dict[str, Any] = {}
        self._names: dict[tuple[str, int], tuple[tuple[str, str], ...]] = {}

    def why_failed(self, scope: str, region: Region) -> Difference | None:
        """Return why this way failed in another scope of the same code; None where it was not tried."""
        return self._reasons.get((self._code(scope), self._way(scope, region))) if self._reasons else None

    def keep(self, scope: str, failed: list[tuple[Region, Difference]]) -> None:
        """Keep the ways that failed in a scope for which none was right."""
        for region, difference in failed:
            self._reasons.setdefault((self._code(scope), self._way(scope, region)), difference)

    def _code(self, scope: str) -> Any:
        if scope not in self._codes:
            module = self._model.get_submodule(scope)
            # Of layers in a list, one may have more than another.
            rows = ((series_of(name), class_name(child)) for name, child in module.named_modules())
            self._codes[scope] = tuple(sorted(dict.fromkeys(rows)))
        return self._codes[scope]

    def _way(self, scope: str, region: Region) -> Any:
        own = region.below(scope)
        units = own.num_units
        cuts = tuple(
            sorted((name, cut.dim, cut.kind, len(cut.groups), cut.groups[0] == units) for name, cut in own.cuts.items())
        )
        spread = units >= self._num_tp_ranks, units % self._num_tp_ranks == 0
        roles = tuple(sorted(own.roles.items()))
        plain = tuple(sorted(own.shared)), own.integers, own.inputs, own.once, own.resizes, own.drops
        return cuts, spread, self._named(scope, units), roles, plain

    def _named(self, scope: str, units: int) -> tuple[tuple[str, str], ...]:
        """Return the attributes of the scope's modules that hold this number."""
        if (scope, units) not in self._names:
            modules = self._model.get_submodule(scope).named_modules()
            held = [
                (name, key)
                for name, child in modules
                for key, v in vars(child).items()
                if type(v) is int and v == units
            ]
            self._names[scope, units] = tuple(held)
        return self._names[scope, units]
