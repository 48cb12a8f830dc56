"""Surroundings of a region: what is cut around it or inside of it, and code elsewhere that uses its tensors.

A region that is right by itself may be wrong in its place. Most of that is known before its proof, which it then spares.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.apply.tensor.cutting import find_tensor
from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError
from meshwright.apply.tensor.search.trace import Trace
from meshwright.apply.tensor.tensor_layout import Region, is_inside

__all__: list[str] = []

_IS_ENTERED = "shards of what is cut around it would enter it"


class SurroundedError(DisprovedError):
    """A region is not right in its place, whatever a proof says: something else is cut or used there."""


class Surroundings:
    """The surroundings of regions.

    Args:
        trace: The trace, with the model.
        regions: The regions found so far; other code adds to them.
    """

    def __init__(self, trace: Trace, regions: Sequence[Region]) -> None:
        self._trace = trace
        self._regions = regions
        self._called: dict[int, list[str]] = {}  # id of a module -> the names under which it was called
        for name in trace.calls:
            self._called.setdefault(id(trace.module.get_submodule(name)), []).append(name)

    def refuse_entered(self, scope: str) -> None:
        """Refuse a scope that shards of a region enter, which no region in it could be proven for.

        Raises:
            SurroundedError: Rows of another region lie in it, and its columns do not.
        """
        if any(_enters(other, scope) for other in self._regions):
            raise SurroundedError(_IS_ENTERED)

    def refuse_others_inside(self, region: Region) -> None:
        """Refuse a region that takes something from regions found before. What a proof completes may be refused later.

        Raises:
            SurroundedError: It holds something that is cut, or its shards enter another one's scope.
        """
        # Its proof took that as whole, with other gradients on each rank.
        cut = {name for other in self._regions for name in other.cuts}
        if cut & self.held(region):
            raise SurroundedError("it holds something that is cut by itself")
        if any(_enters(region, other.scope) for other in self._regions):
            raise SurroundedError(_IS_ENTERED)

    def refuse_uses_elsewhere(self, region: Region) -> None:
        """Refuse to cut tensors, or to have terms of their gradients, that other code uses as well.

        Raises:
            SurroundedError: Code outside the region uses one of its tensors.
        """
        alone = set(region.roles.values()) <= {"vocabulary", "head", "gathered"}
        places, module = set(region.roles) if alone else {region.scope}, self._trace.module
        around = {name for place in places for name in self._called.get(id(module.get_submodule(place)), ())}
        for name in (*region.cuts, *region.partial):
            for path, functions in self._trace.uses.get(id(find_tensor(module, name)), {}).items():
                if around.isdisjoint(path):
                    raise SurroundedError(f"'{name}' is also used by {', '.join(sorted(functions))} {_where(path)}")

    def held(self, region: Region) -> set[str]:
        """Return the whole parameters inside a region of whose gradient each rank has a term."""
        held = set(region.partial)
        if region.roles.get(region.scope) == "sum":
            held |= {name for names in self._trace.names.values() for name in names if is_inside(name, region.scope)}
        return held - set(region.cuts)


def _enters(region: Region, scope: str) -> bool:
    """Tell whether shards of a region enter this module: some of its rows lie in it, and columns do not."""
    rows = any(cut.kind == "row" and is_inside(name, scope) for name, cut in region.cuts.items())
    return rows and any(cut.kind != "row" and not is_inside(name, scope) for name, cut in region.cuts.items())


def _where(path: tuple[str, ...]) -> str:
    return f"in '{path[-1] or 'the model'}'" if path else "outside the model's forward"
