"""Layers that run on slices of the sequence between their regions (sequence parallelism), found by trial.

The code between regions (norms, dropout, sums) would compute the same on every rank. On slices each rank computes its own part;
the all-reduce after a region becomes a reduce-scatter, with an all-gather before the next. That is right where the code treats
each position by itself, which the proof checks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from meshwright.apply.modules.copies import repeat_call
from meshwright.apply.tensor.cutting import find_tensor
from meshwright.apply.tensor.proof.conditions import Conditions
from meshwright.apply.tensor.proof.place_reads import PlaceReads
from meshwright.apply.tensor.proof.scope_values import LastDrawn, ScopeValues
from meshwright.apply.tensor.proof.shards_against_whole import Difference, DisprovedError
from meshwright.apply.tensor.roles import is_stream
from meshwright.apply.tensor.search.regions import MOST_ALIKE_AROUND, Proving, Reasons
from meshwright.apply.tensor.search.trace import Call, Trace
from meshwright.apply.tensor.tensor_layout import Chain, Region, TensorLayout, is_inside, name_below, regions_inside
from meshwright.trees import tensors_in

__all__: list[str] = []

MAX_TRIALS = 32
"""Places of entry that are tried for one layer [count]."""


def find_chains(
    trace: Trace, regions: Sequence[Region], num_tp_ranks: int, drawn: LastDrawn, proving: Proving
) -> tuple[tuple[Chain, ...], list[Region]]:
    """Return the chains of layers that may run on slices, and the regions with the modules at which tensors then enter.

    Args:
        trace: The trace.
        regions: The regions found.
        num_tp_ranks: Ranks [count].
        drawn: Values of the scope that was tried last.
        proving: Has the deadline, and what was proven for scopes that are the same.
    """
    chains: list[Chain] = []
    found = list(regions)
    for layers in _runs(trace):
        in_slices = [outer for chain in chains for outer in chain.layers]
        if proving.work.is_spent:
            break
        is_within = any(is_inside(layer, outer) for layer in layers for outer in in_slices)
        # Layers cut one by one give whole results: slices around them would be put together and taken apart again.
        if is_within or not all(any(not own.is_apart for own in regions_inside(layer, found)) for layer in layers):
            continue
        chain, changed = _try_run(trace, layers, found, num_tp_ranks, drawn, proving=proving)
        if chain is not None:
            chains.append(chain)
            found = [changed.get(id(region), region) for region in found]
    return tuple(chains), found


def _runs(trace: Trace) -> Iterator[list[str]]:
    """Yield names of consecutive modules in a list, each called with the result of the one before."""
    for name, container in trace.module.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        run: list[str] = []
        for child, _ in container.named_children():
            path = f"{name}.{child}" if name else child
            is_next = bool(run) and _hands_on(run[-1], path, trace)
            if run and not is_next:
                yield run
            run = [*run, path] if is_next else ([path] if _stream(path, trace) is not None else [])
        if run:
            yield run


def _stream(layer: str, trace: Trace) -> Tensor | None:
    """Return the tensor among a layer's arguments that its result matches."""
    call = trace.calls.get(layer)
    if call is None or not call.results or trace.num_calls[layer] > 1:
        return None
    given = next((tensor for tensor in tensors_in((call.args, call.kwargs)) if is_stream(tensor)), None)
    return given if given is not None and given.requires_grad and given.shape[1] > 1 else None


def _hands_on(layer: str, following: str, trace: Trace) -> bool:
    given = _stream(following, trace)
    return given is not None and id(given) in trace.calls[layer].results


def _try_run(
    trace: Trace,
    layers: list[str],
    regions: Sequence[Region],
    num_tp_ranks: int,
    drawn: LastDrawn,
    *,
    proving: Proving,
) -> tuple[Chain | None, dict[int, Region]]:
    changed: dict[int, Region] = {}
    partial: list[str] = []
    whole_inputs: list[str] = []
    ways: dict[str, tuple[Region, ...]] = {}
    dims: tuple[int, ...] = (0, 1)
    for layer in layers:
        proving.check_deadline()
        inside = regions_inside(layer, regions)
        shape = repr([region.below(layer) for region in inside])
        whole = _whole_inputs(layer, inside, trace)
        alone = Chain(
            layers=("",),
            whole_inputs=tuple(name_below(layer, name) for name in whole),
            drops=layer in trace.drawing,
        )
        module = trace.module.get_submodule(layer)
        stream = _stream(layer, trace)
        trial = _LayerTrial(module, trace.calls[layer], stream, alone, num_tp_ranks, drawn, layer, proving)
        reasons = Reasons(MOST_ALIKE_AROUND)
        for way in _known_first(ways.get(shape), _ways(layer, inside, trace)):
            dims_here, own = trial.check(way, dims)
            if dims_here and not _used_elsewhere(layer, own, trace):
                break
            if not reasons.are_new_enough(trial.difference):
                return None, {}
        else:
            return None, {}
        ways[shape], dims = way, dims_here
        for region, new in zip(inside, way, strict=True):
            changed[id(region)] = region.replace(
                entry=None if new.entry is None else new.above(layer).entry, entered=new.entered
            )
        partial += [f"{layer}.{name}" for name in own]
        whole_inputs += whole
    drops = any(layer in trace.drawing for layer in layers)
    made = Chain(layers=tuple(layers), partial=tuple(partial), whole_inputs=tuple(whole_inputs), drops=drops, dims=dims)
    return made, changed


def _known_first(known: tuple[Region, ...] | None, ways: Iterator[tuple[Region, ...]]) -> Iterator[tuple[Region, ...]]:
    """Yield first the way of another layer that looks alike; it is proven for this one too."""
    if known is not None:
        yield known
    yield from (way for way in itertools.islice(ways, MAX_TRIALS) if way != known)


def _used_elsewhere(layer: str, partial: Sequence[str], trace: Trace) -> bool:
    """Tell whether a parameter with a gradient to be summed is also used outside, where every rank has its whole gradient."""
    found = (trace.uses.get(id(find_tensor(trace.module, f"{layer}.{name}")), {}) for name in partial)
    return any(layer not in path for uses in found for path in uses)


@dataclasses.dataclass(eq=False)
class _LayerTrial:
    """A layer, prepared to run on slices.

    Every slice needs at least two positions, or two samples: a slice of everything would also prove a layer that mixes them.
    Where the first batch was smaller, the layer's arguments are repeated.
    """

    layer: nn.Module
    call: Call
    stream: Tensor | None
    """The argument that is to be sliced."""
    chain: Chain
    """The layer as a chain of one."""
    num_tp_ranks: int
    drawn: LastDrawn
    name: str
    proving: Proving
    difference: Difference | None = None
    """Why the last way failed, where that is known."""
    _made: dict[int, Conditions | None] = dataclasses.field(default_factory=dict[int, Conditions | None])

    def __post_init__(self) -> None:
        self.reads = PlaceReads(self.layer)

    @functools.cached_property
    def _values(self) -> ScopeValues:
        """Values of the layer: a twin needs none, and making them takes a collection."""
        return ScopeValues(self.layer, self.drawn)

    def check(self, way: tuple[Region, ...], dims: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return (the dims of these along which slices may lie, the parameters whose gradients then have to be summed)."""
        tried = ("chain", repr((way, self.chain, tuple(dims))))
        known = self.proving.passed_on.find(tried, self.name)
        if known is not None:
            return known
        with self.reads.watched():
            found = self._try(way, dims)
        if not found[0]:
            self.proving.work.add_failed(self.name)
        else:
            for same in {tuple(dims), found[0]}:  # of dims that are all right, nothing else is tried
                self.proving.passed_on.keep(("chain", repr((way, self.chain, same))), self.name, found, self.reads)
        return found

    def _try(self, way: tuple[Region, ...], dims: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        right: list[int] = []
        partial: dict[str, None] = {}
        for dim in reversed(dims):  # the sequence first: errors show there
            chain = self.chain.replace(dims=(dim,))
            conditions = self._conditions(dim)
            if conditions is None:
                continue
            try:
                own = conditions.check(TensorLayout(regions=way, chains=(chain,)), on_slices=True)
            except DisprovedError as error:
                self.difference = error.difference
                if dim == 1:
                    break
                continue
            right.append(dim)
            partial |= dict.fromkeys(own)
        return tuple(sorted(right)), tuple(partial)

    def _conditions(self, dim: int) -> Conditions | None:
        """Return the conditions for slices along a dim; None where that cannot be tried."""
        if dim not in self._made:
            try:
                self._made[dim] = Conditions(self.layer, self._calls(dim), self.num_tp_ranks, self._values)
            except Exception:  # noqa: BLE001 - whatever the layer raises when it is run by itself
                self._made[dim] = None
        return self._made[dim]

    def _calls(self, dim: int) -> list[Call]:
        """Return the calls of the trial: the recorded one, and a larger one along both dims if that was small."""
        args, kwargs = self.call.args, self.call.kwargs
        shape = (0, 0) if self.stream is None else self.stream.shape
        # Along the other dim two are enough; of only one, a layer that subtracts a mean leaves zeros without gradients.
        for other, least in ((dim, 2 * self.num_tp_ranks), (1 - dim, 2)):
            have = shape[other]
            if 0 < have < least:
                args, kwargs = repeat_call((args, kwargs), have, -(-least // have), along_samples=other == 0)
        if args is self.call.args:
            return [self.call]
        return [dataclasses.replace(self.call, args=args, kwargs=kwargs), self.call]


def _columns(region: Region) -> list[str]:
    return [*(name for name, role in region.roles.items() if role == "column"), *region.shared]


def _whole_inputs(layer: str, regions: Sequence[Region], trace: Trace) -> list[str]:
    """Return the columns whose input is an argument of the layer other than the stream."""
    call = trace.calls[layer]
    stream = _stream(layer, trace)
    beside = {id(tensor) for tensor in tensors_in((call.args, call.kwargs)) if tensor is not stream}
    found = []
    for name in (name for region in regions for name in _columns(region)):
        own = trace.calls.get(name)
        if own is not None and any(id(tensor) in beside for tensor in tensors_in((own.args, own.kwargs))):
            found.append(name)
    return found


def _ways(layer: str, regions: Sequence[Region], trace: Trace) -> Iterator[tuple[Region, ...]]:
    """Yield the regions, with names below the layer, for each choice of modules at which they gather the sequence."""
    whole = set(_whole_inputs(layer, regions, trace))
    per_region = [[region, *_entries(layer, region, whole, trace)] for region in regions]
    choices = itertools.product(*(range(len(options)) for options in per_region))
    for places in sorted(itertools.islice(choices, 256), key=sum):
        yield tuple(options[place].below(layer) for options, place in zip(per_region, places, strict=True))


def _entries(layer: str, region: Region, whole_inputs: set[str], trace: Trace) -> Iterator[Region]:
    """Yield the region with an entry at each module around its columns that was called with their input."""
    taken: set[int] = set()
    columns = _columns(region)
    for name in set(columns) - whole_inputs:
        call = trace.calls.get(name)
        if call is not None:
            taken |= {id(tensor) for tensor in tensors_in((call.args, call.kwargs))}
    for name in _around(columns, layer):
        call = trace.calls.get(name)
        if call is None:
            continue
        tensors = list(tensors_in((call.args, call.kwargs)))
        entered = tuple(index for index, tensor in enumerate(tensors) if id(tensor) in taken and is_stream(tensor))
        if entered:
            yield region.replace(entry=name, entered=entered)


def _around(columns: Sequence[str], layer: str) -> Iterator[str]:
    """Yield the names of the modules around all columns, innermost first, up to the layer and without it."""
    if not columns:
        return
    parts = [name.split(".")[:-1] for name in columns]
    common = [words[0] for words in itertools.takewhile(lambda w: len(set(w)) == 1, zip(*parts, strict=False))]
    while len(common) > len(layer.split(".")):
        yield ".".join(common)
        common.pop()
