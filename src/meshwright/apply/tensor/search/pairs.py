"""Pairs of products that might be cut, read off a trace. The ways to cut each are in `candidates.py`."""

from __future__ import annotations

import dataclasses
import itertools

from meshwright.apply.tensor.search.trace import OUTPUT, Product, Trace

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Products whose results reach only one other product, columns and their row; or several, each of which takes all of them."""

    columns: tuple[Product, ...]
    row: Product
    sides: tuple[Product, ...] = ()
    """Embeddings that are looked up inside, one value for each unit: relative position biases."""
    is_mixed: bool = False
    """Whether the row's input comes from other products, too, that feed more than the row: a stream that layers add to."""
    rows_beside: tuple[Product, ...] = ()
    """Further rows of the same columns: two streams that attend together have an output projection each."""

    @property
    def rows(self) -> tuple[Product, ...]:
        """All rows."""
        return self.row, *self.rows_beside

    def scope(self, trace: Trace) -> str:
        """Return the name of the innermost module that holds the pair and was called: a list of layers is not."""
        paths = [trace.owner(product).split(".") for product in (*self.columns, *self.rows)]
        if paths[0] == [""]:
            return ""
        common = list(itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
        name = ".".join(parts[0] for parts in common)
        while name and name not in trace.calls:
            name = name.rpartition(".")[0]
        return name


def pair_of(key: int, trace: Trace, taken: set[int]) -> Pair | None:
    """Return the pair whose (first) row is this parameter, if its input comes from products that feed nothing else."""
    calls = trace.products[key]
    sources = frozenset[int]().union(*(call.sources for call in calls))
    if calls[0].kind == "embedding" or key in taken:
        return None
    free = [trace.products[source] for source in sources - {key} if source in trace.products]
    free = [calls for calls in free if calls[0].parameter not in taken]
    columns = [c[0] for c in free if c[0].kind != "embedding" and trace.successors[c[0].key] == {key}]
    sides = [c[0] for c in free if c[0].kind == "embedding"]
    beside = () if columns else _rows_beside(calls[0], trace, taken)
    if beside:
        columns = [trace.products[source][0] for source in calls[0].sources]
    if not columns:
        return None
    order = list(trace.products)
    columns.sort(key=lambda product: order.index(product.key))
    is_mixed = len(columns) < sum(c[0].kind != "embedding" for c in free)
    return Pair(columns=tuple(columns), row=calls[0], sides=tuple(sides), is_mixed=is_mixed, rows_beside=beside)


def _rows_beside(row: Product, trace: Trace, taken: set[int]) -> tuple[Product, ...]:
    """Return the layers that take results of the same products as the first of them does, which feed nothing else."""
    keys = [trace.successors.get(source, set()) for source in row.sources]
    if not keys or len(keys[0]) < 2 or any(other != keys[0] for other in keys) or not keys[0] <= trace.products.keys():
        return ()
    if not taken.isdisjoint(keys[0]) or not taken.isdisjoint(row.sources) or any(source < 0 for source in row.sources):
        return ()
    first, *others = (trace.products[key] for key in trace.products if key in keys[0])
    size = trace.parameters[row.parameter].shape[row.in_dim]
    are_alike = all(
        call.sources == row.sources
        and trace.is_layer(call)
        and trace.parameters[call.parameter].shape[call.in_dim] == size
        for calls in (first, *others)
        for call in calls
    )
    return tuple(calls[0] for calls in others) if are_alike and first[0] is row else ()


def in_order(trace: Trace) -> list[int]:
    """Return the keys of products in the order in which their pairs are cut.

    Late ones are the row of a pair, and a column of a larger pair in the same module. The last are rows with others beside
    them, each of which may be a column of a pair of its own.
    """
    pairs = [pair for key in trace.products if (pair := pair_of(key, trace, set())) is not None]
    scopes = [pair.scope(trace) for pair in pairs]
    late = {
        pair.row.key
        for pair, scope in zip(pairs, scopes, strict=True)
        for other, around in zip(pairs, scopes, strict=True)
        if scope == around and pair.row in other.columns and len(other.columns) > len(pair.columns)
    }
    several = {pair.row.key for pair in pairs if pair.rows_beside}
    return sorted(trace.products, key=lambda key: (key in several, key in late))


def meets_whole(pair: Pair, trace: Trace) -> bool:
    """Tell whether a column's result is added to a whole tensor of its shape, or joined with one: no cut of the pair fits.

    What comes from a product of the pair's scope that is none of its columns is whole, as a stream that layers add to. What comes
    from outside or from a side alone may be cut as it enters; what was broadcast or repeated follows the other one's shape.
    """
    columns = frozenset(column.key for column in pair.columns)
    sides = frozenset(side.key for side in pair.sides)
    scope = pair.scope(trace)
    return any(
        scope in product.path
        for cut, other in trace.meetings.found
        if other.isdisjoint(columns) and not cut.isdisjoint(columns)
        for key in other - sides
        for product in trace.products[key]
    )


def feeds_only_the_output(key: int, trace: Trace) -> bool:
    """Tell whether a product's results reach only the model's outputs."""
    return trace.successors.get(key, set()) <= {OUTPUT}
