"""Pairs of products that might be cut, read off a trace. The ways to cut each are in `candidates.py`."""

from __future__ import annotations

import dataclasses
import itertools

from torch import nn

from meshwright.apply.tensor.search.trace import OUTPUT, Product, Trace

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a model's tensors and modules."""

    module: nn.Module
    of: dict[int, list[str]]
    """id of a parameter -> all its FQNs."""
    parameters: dict[int, nn.Parameter]

    @classmethod
    def read(cls, module: nn.Module) -> Names:
        """Return the names of a module's parameters."""
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        return cls(module=module, of=names, parameters=parameters)

    def owner(self, product: Product) -> str:
        """Return the name of the module that owns a product's parameter, the innermost that was running."""
        own = [name.rpartition(".")[0] for name in self.of[product.parameter]]
        return next((path for path in reversed(product.path) if path in own), own[0])

    def is_layer(self, product: Product, trace: Trace) -> bool:
        """Tell whether the product is all that its owner computes, as in nn.Linear."""
        name = self.owner(product)
        owner = self.module.get_submodule(name)
        call = trace.calls.get(name)
        return (
            product.path[-1:] == (name,)
            and not any(True for _ in owner.children())
            and sum(parameter is not None for parameter in owner._parameters.values()) <= 2
            and call is not None
            and len(call.results) == 1
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Products whose results reach only one other product: columns and their row."""

    columns: tuple[Product, ...]
    row: Product
    sides: tuple[Product, ...] = ()
    """Embeddings that are looked up inside, one value for each unit: relative position biases."""

    def scope(self, names: Names) -> str:
        """Return the name of the innermost module that holds the pair."""
        paths = [names.owner(product).split(".") for product in (*self.columns, self.row)]
        if paths[0] == [""]:
            return ""
        common = list(itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
        return ".".join(parts[0] for parts in common)


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
    return Pair(columns=tuple(columns), row=calls[0], sides=tuple(sides))


def feeds_only_the_output(key: int, trace: Trace) -> bool:
    """Tell whether a product's results reach only the model's outputs."""
    return trace.successors.get(key, set()) <= {OUTPUT}
