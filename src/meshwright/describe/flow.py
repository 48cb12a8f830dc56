"""Flow of data between recorded operators: attention cores, and the products that tensor parallelism may split.

The pairs of column and row products are those that the search for a tensor layout proposes (`apply/tensor/search/pairs.py`):
products whose results reach only one other product. Whether a proposal computes the same is known only to that search's proof.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

from meshwright.describe.ownership import Ownership
from meshwright.describe.recorder import LayerCall, Step
from meshwright.spec.operator import Split

__all__: list[str] = []

_SMALL_SHARE = 0.01
"""A product that stands alone is split only where it holds at least this share of the parameters, as in the search."""

_OUTPUT = ""


def core_steps(steps: Sequence[Step]) -> set[int]:
    """Return the places of attention's core: fused attention, and two products of activations with what lies between."""
    core: set[int] = set()
    for place, step in enumerate(steps):
        if not step.products or step.weight_factor is not None:
            continue
        if step.products[0].kind == "attention":
            core.add(place)
            continue
        between = _between_products(place, steps)
        if between:
            core.update(between, [place])
    return core


def _between_products(last: int, steps: Sequence[Step]) -> set[int]:
    """Return the elementwise steps through which another product of activations reaches this one, and that product."""
    seen: set[int] = set()
    waiting = list(steps[last].inputs)
    while waiting:
        place = waiting.pop()
        if place not in seen and steps[place].layer == steps[last].layer:
            seen.add(place)
            waiting += [] if steps[place].products else steps[place].inputs
    found: set[int] = set()
    for place in sorted(seen):
        step = steps[place]
        if step.products:
            if step.weight_factor is None and step.products[0].kind == "batched_matmul" and not step.is_constant:
                found.add(place)
        elif found.intersection(step.inputs):
            found.add(place)
    return found


_SUMS: Final = ("add", "add_", "sub", "sub_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnsAndRow:
    """Products whose results reach only one other product, by the names of their weights."""

    columns: tuple[str, ...]
    row: str


class ProductFlow:
    """Which product feeds which.

    Args:
        steps: The steps of one forward.
        outputs: Places of the steps that the model returns.
        parameters: The module's parameters.
    """

    def __init__(self, steps: Sequence[Step], outputs: frozenset[int], parameters: Ownership) -> None:
        self._steps = steps
        self._parameters = parameters
        self._sources: list[frozenset[str]] = []
        self._inputs: list[frozenset[str]] = []
        self._successors: dict[str, set[str]] = {}
        self._products: dict[str, list[int]] = {}
        for place, step in enumerate(steps):
            self._follow(place, step)
        for place in outputs:
            for source in self._sources[place]:
                self._successors.setdefault(source, set()).add(_OUTPUT)
        self._total = sum(math.prod(shape) for shape in parameters.shapes.values())
        self._taken: set[str] = set()
        self._vocabularies = self._find_vocabularies()
        self._pairs = self._find_pairs()
        self._alone = self._find_alone()

    # -- reading ------------------------------------------------------------------------------------------------

    def _follow(self, place: int, step: Step) -> None:
        inputs = frozenset[str]().union(*(self._sources[source] for source in step.inputs))
        self._inputs.append(inputs)
        key = self._key(step)
        is_mixing = (
            bool(step.products) and step.weight_factor is not None and not key and step.function != "convolution"
        )
        if key or is_mixing:
            for source in inputs:
                self._successors.setdefault(source, set()).add(key or f"mixed by {place}")
        if key:
            self._products.setdefault(key, []).append(place)
            self._successors.setdefault(key, set())
        self._sources.append(frozenset([key] if key else () if is_mixing else inputs))

    def _key(self, step: Step) -> str:
        if step.module in self._parameters.recurrent:
            return ""  # each step's result is the next one's input: its entries mix
        if step.is_lookup:
            return f"lookup:{step.weights[0]}"
        is_product = bool(step.products) and step.products[0].is_plain
        return step.weight if is_product and step.weight_factor is not None else ""

    def _is_layer(self, key: str) -> bool:
        """Tell whether the module that owns a weight is the one that uses it."""
        owners = {name.rpartition(".")[0] for name in self._parameters.names[key.removeprefix("lookup:")]}
        return all(self._steps[place].module in owners for place in self._products[key])

    def _is_large(self, name: str) -> bool:
        return math.prod(self._parameters.shapes[name]) >= _SMALL_SHARE * self._total

    # -- candidates ---------------------------------------------------------------------------------------------

    def _find_vocabularies(self) -> set[str]:
        found: set[str] = set()
        for key in self._products:
            name = key.removeprefix("lookup:")
            keys = [key, *([name] if name in self._products else [])]
            if key.startswith("lookup:") and self._is_large(name) and all(map(self._is_layer, keys)):
                found.update(keys)
                self._taken.add(name)
        return found

    def _pair_of(self, key: str, taken: set[str]) -> ColumnsAndRow | None:
        if key.startswith("lookup:") or key in taken:
            return None
        sources = frozenset[str]().union(*(self._inputs[place] for place in self._products[key])) - {key}
        columns = [
            source
            for source in self._products
            if source in sources
            and source not in taken
            and not source.startswith("lookup:")
            and self._successors[source] == {key}
        ]
        return ColumnsAndRow(columns=tuple(columns), row=key) if columns else None

    def _find_pairs(self) -> list[ColumnsAndRow]:
        proposed = [pair for key in self._products if (pair := self._pair_of(key, set())) is not None]
        late = {
            pair.row
            for pair, other in itertools.permutations(proposed, 2)
            if pair.row in other.columns and len(other.columns) > len(pair.columns) and _scope(pair) == _scope(other)
        }
        found: list[ColumnsAndRow] = []
        for key in sorted(self._products, key=lambda key: key in late):
            pair = self._pair_of(key, self._taken)
            if pair is None:
                continue
            if self._adds_what_is_whole(pair):
                continue  # its layers may be cut one by one
            if self._has_units(pair) and self._ends_in_a_simple_module(pair):
                found.append(pair)
                self._taken.update((pair.row, *pair.columns))
        return found

    def _adds_what_is_whole(self, pair: ColumnsAndRow) -> bool:
        """Tell whether, between columns and row, another product's result is added: whole, it does not fit to shards."""
        columns = set(pair.columns)
        for step, sources in zip(self._steps, self._inputs, strict=True):
            others = {source for source in sources - columns if not source.startswith("lookup:")}
            if step.function in _SUMS and sources & columns and others:
                return True
        return False

    def _has_units(self, pair: ColumnsAndRow) -> bool:
        """Tell whether heads or features could be divided: sizes that have a divisor in common."""
        row = self._steps[self._products[pair.row][0]].products[0]
        widths = [self._steps[self._products[column][0]].products[0].columns for column in pair.columns]
        return math.gcd(row.inner, *widths) > 1

    def _ends_in_a_simple_module(self, pair: ColumnsAndRow) -> bool:
        """Tell whether the row's module has no code around it, which often adds whole terms before ranks' results are summed."""
        return all(self._steps[place].module in self._parameters.simple for place in self._products[pair.row])

    def _find_alone(self) -> set[str]:
        return {
            key
            for key in self._products
            if not key.startswith("lookup:")
            and key not in self._taken
            and self._is_large(key)
            and self._is_layer(key)
            and not self._is_read_elsewhere(key)
        }

    def _is_read_elsewhere(self, key: str) -> bool:
        """Tell whether other operators than its product read a weight: they would need the whole of it."""
        own = set(self._products[key])
        return any(key in step.weights for place, step in enumerate(self._steps) if place not in own)

    # -- answers ------------------------------------------------------------------------------------------------

    @property
    def num_pairs(self) -> int:
        """Pairs that are proposed [count]."""
        return len(self._pairs)

    def spanning_pairs(self, order: Sequence[str]) -> list[tuple[str, str, bool]]:
        """Return pairs of several layers: the first layer, the last, and whether code around the layers lies between them.

        Args:
            order: The layers as they ran first.
        """
        found: list[tuple[str, str, bool]] = []
        for pair in self._pairs:
            steps = [self._steps[place] for key in (*pair.columns, pair.row) for place in self._products[key]]
            layers = sorted({step.layer for step in steps}, key=order.index)
            if len(layers) > 1:
                parents = {layer.rpartition(".")[0] for layer in layers}
                is_chain = len(parents) == 1 and parents <= self._parameters.chains
                is_simple = all(step.module in self._parameters.simple for step in steps)
                found.append((layers[0], layers[-1], not (is_chain and is_simple)))
        return found

    def splits(self, calls: Mapping[str, LayerCall]) -> list[Split]:
        """Return how each step may be split."""
        columns = {name: number for number, pair in enumerate(self._pairs) for name in pair.columns}
        rows = {pair.row for pair in self._pairs}
        ends = {key for key in self._alone | self._vocabularies if self._successors[key] <= {_OUTPUT}}
        in_pairs = columns.keys() | rows
        streams = {
            step.layer: calls[step.layer].outputs[0][:2]
            for step in self._steps
            if self._key(step) in in_pairs and step.layer in calls and _may_be_in_slices(step.layer, calls[step.layer])
        }
        found: list[Split] = []
        for place, step in enumerate(self._steps):
            key, sources = self._key(step), self._inputs[place]
            split: Split = "whole"
            if key:
                split = self._of_product(key, columns, rows)
            elif sources and (sources <= ends or _is_one_pair({columns.get(name) for name in sources})):
                split = "inside"
            elif not step.products and step.shape[:2] == streams.get(step.layer, ()):
                split = "rows"
            found.append(split)
        return found

    def _of_product(self, key: str, columns: Mapping[str, int], rows: set[str]) -> Split:
        if key in self._vocabularies:
            return "inner" if key.startswith("lookup:") else "columns"
        if key in rows:
            return "inner"
        return "columns" if key in columns or key in self._alone else "whole"


def _is_one_pair(numbers: set[int | None]) -> bool:
    return len(numbers) == 1 and None not in numbers


def _scope(pair: ColumnsAndRow) -> str:
    paths = [name.split(".")[:-1] for name in (*pair.columns, pair.row)]
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common)


def _may_be_in_slices(layer: str, call: LayerCall) -> bool:
    """Tell whether a layer is one of a list and hands on a sequence: it might run on slices of it."""
    is_listed = layer.rpartition(".")[2].isdigit() and call.num_calls == 1
    return is_listed and bool(call.outputs) and len(call.outputs[0]) == 3 and call.outputs[0][1] > 1
