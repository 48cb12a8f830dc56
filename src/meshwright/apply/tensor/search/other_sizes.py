"""Ways that failed for a scope, which are not tried again in scopes of the same code whose tensors have other sizes.

A way is known by what it does with which tensors, and by how its units stand to the ranks and to the sizes of the scope: what
failed with one head for two ranks says nothing about two heads.
"""

from __future__ import annotations

from typing import Any

from torch import nn

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
        self._codes: dict[tuple[str, frozenset[str] | None], Any] = {}
        self._names: dict[tuple[str, int, frozenset[str] | None], tuple[tuple[str, str], ...]] = {}

    def why_failed(self, scope: str, region: Region) -> Difference | None:
        """Return why this way failed in another scope of the same code; None where it was not tried."""
        return self._reasons.get(self._way(scope, region)) if self._reasons else None

    def keep(self, scope: str, failed: list[tuple[Region, Difference]]) -> None:
        """Keep the ways that failed in a scope for which none was right."""
        for region, difference in failed:
            self._reasons.setdefault(self._way(scope, region), difference)

    def _code(self, scope: str, touched: frozenset[str] | None) -> Any:
        """Return the classes of a scope and of the modules in it that a way touches; None: of all in it."""
        if (scope, touched) not in self._codes:
            rows = ((series_of(name), class_name(child)) for name, child in self._modules(scope, touched))
            self._codes[scope, touched] = tuple(sorted(dict.fromkeys(rows)))  # of layers in a list, one may have more
        return self._codes[scope, touched]

    def _modules(self, scope: str, touched: frozenset[str] | None) -> list[tuple[str, nn.Module]]:
        modules = self._model.get_submodule(scope).named_modules()
        return [(name, child) for name, child in modules if not name or touched is None or name in touched]

    def _way(self, scope: str, region: Region) -> Any:
        own = region.below(scope)
        units = own.num_units
        # A class of the user's is one code, whatever else some of its layers have; torch's containers run what is in them.
        is_plain = _is_torchs(self._model.get_submodule(scope))
        touched = None if is_plain else frozenset({*own.roles, *(name.rpartition(".")[0] for name in own.cuts)})
        cuts = tuple(
            sorted((name, cut.dim, cut.kind, len(cut.groups), cut.groups[0] == units) for name, cut in own.cuts.items())
        )
        spread = units >= self._num_tp_ranks, units % self._num_tp_ranks == 0
        roles = tuple(sorted(own.roles.items()))
        plain = tuple(sorted(own.shared)), own.integers, own.inputs, own.once, own.resizes, own.drops
        return self._code(scope, touched), cuts, spread, self._named(scope, units, touched), roles, plain

    def _named(self, scope: str, units: int, touched: frozenset[str] | None) -> tuple[tuple[str, str], ...]:
        """Return the attributes of those modules that hold this number."""
        if (scope, units, touched) not in self._names:
            held = [
                (name, key)
                for name, child in self._modules(scope, touched)
                for key, v in vars(child).items()
                if type(v) is int and v == units
            ]
            self._names[scope, units, touched] = tuple(held)
        return self._names[scope, units, touched]


def _is_torchs(module: nn.Module) -> bool:
    """Tell whether a module's class is one of torch's own."""
    return type(module).__module__.partition(".")[0] == "torch"
