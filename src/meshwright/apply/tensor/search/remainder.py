"""Remainder beside pairs and large layers: where it is much, small layers are cut, too, the largest first (ADR 0035)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshwright.apply.tensor.search.pairs import feeds_only_the_output
from meshwright.apply.tensor.search.trace import Trace
from meshwright.apply.tensor.tensor_layout import Region

__all__: list[str] = []

WHOLE_SHARE = 0.1
"""Share of the parameters of layers, and of those in lists of layers, that stays whole without more exchanges."""


class Remainder:
    """The parameters of a model's layers, without its tables and heads: beside a large one of these, all layers are small.

    Args:
        trace: The trace.
        regions: What is cut; other code adds to it.
        left: Keys of parameters that shall stay whole.
    """

    def __init__(self, trace: Trace, regions: Sequence[Region], left: Iterable[int]) -> None:
        self._trace = trace
        self._regions = regions
        heads = {key for key in trace.products if key > 0 and feeds_only_the_output(key, trace)}
        apart = heads.union(left, *(trace.met.get(key, ()) for key in heads))
        layers = [key for key in trace.parameters if key not in apart and -key not in trace.products]
        self._groups = [set(layers), {key for key in layers if _is_in_a_list(trace.names[key][0])}]
        self._known: tuple[int, list[set[int]]] | None = None  # by how many regions there are
        self._by_size = sorted(layers, key=lambda key: -trace.parameters[key].numel())

    def by_size(self) -> Iterator[int]:
        """Yield the keys of these parameters, the largest first, that are of a group of which much is whole by then."""
        yield from (key for key in self._by_size if self.is_much([key]))

    def is_much(self, keys: Iterable[int]) -> bool:
        """Tell whether one of these is of a group of which more than `WHOLE_SHARE` is whole."""
        return any(not group.isdisjoint(keys) for group in self._much())

    def _much(self) -> list[set[int]]:
        if self._known is None or self._known[0] != len(self._regions):
            cut = {name for region in self._regions for name in region.cuts}
            whole = {key for key in self._by_size if cut.isdisjoint(self._trace.names[key])}
            found = [group for group in self._groups if self._size(group & whole) > WHOLE_SHARE * self._size(group)]
            self._known = len(self._regions), found
        return self._known[1]

    def _size(self, keys: Iterable[int]) -> int:
        return sum(self._trace.parameters[key].numel() for key in keys)


def _is_in_a_list(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))
