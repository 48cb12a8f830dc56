"""Pairs of products that might be cut, read off a trace. The ways to cut each are in `candidates.py`."""

from __future__ import annotations

import dataclasses
import itertools

from meshwright.apply.tensor.search.trace import OUTPUT, Product, Trace

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Products whose results reach only one other product: columns and their row."""

    columns: tuple[Product, ...]
    row: Product
    sides: tuple[Product, ...] = ()
    """Embeddings that are looked up inside, one value for each unit: relative position biases."""
    is_mixed: bool = False
    """Whether the row's input comes from other products, too, that feed more than the row: a stream that layers add to."""

    def scope(self, trace: Trace) -> str:
        """Return the name of the innermost module that holds the pair and was called: a list of layers is not."""
        paths = [trace.owner(product).split(".") for product in (*self.columns, self.row)]
        if paths[0] == [""]:
            return ""
        common = list(itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
        name = ".".join(parts[0] for parts in common)
        while name and name not in trace.calls:
            name = name.rpartition(".")[0]
        return name


def pair_of(key: int, trace: Trace, taken: set[int]) -> Pair | None:
    """Return the pair whose row is this parameter, if its input comes from products that feed nothing else."""
    calls = trace.products[key]
    sources = frozenset[int]().union(*(call.sources for call in calls))
    if calls[0].kind == "embedding" or key in taken:
        return None
    free = [trace.products[source] for source in sources - {key} if source in trace.products]
    free = [calls for calls in free if calls[0].parameter not in taken]
    columns = [c[0] for c in free if c[0].kind != "embedding" and trace.successors[c[0].key] == {key}]
    sides = [c[0] for c in free if c[0].kind == "embedding"]
    if not columns:
        return None
    order = list(trace.products)
    columns.sort(key=lambda product: order.index(product.key))
    is_mixed = len(columns) < sum(c[0].kind != "embedding" for c in free)
    return Pair(columns=tuple(columns), row=calls[0], sides=tuple(sides), is_mixed=is_mixed)


def feeds_only_the_output(key: int, trace: Trace) -> bool:
    """Tell whether a product's results reach only the model's outputs."""
    return trace.successors.get(key, set()) <= {OUTPUT}
