"""Parameters that no layer can be cut by: kept in parts, and put together by the module that computes with them (ADR 0035)."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from meshwright.apply.tensor.search.trace import Trace
from meshwright.apply.tensor.tensor_layout import Cut, Region, TensorLayout, is_inside

__all__: list[str] = []

MAX_FUNCTIONS = 1000
"""Functions of a module whose parameters may be kept in parts: a proof runs all of it [count]."""

MOST_CALLS = 2
"""Calls of such a module in one forward, each of which keeps a whole weight until backward [count]."""


def stored_regions(
    trace: Trace, keys: Collection[int], layout: TensorLayout, num_tp_ranks: int
) -> list[tuple[Region, set[int]]]:
    """Return regions that keep parameters in parts, one for each module that computes with some, and their keys; large first.

    Args:
        trace: The trace.
        keys: Parameters that are not cut, nor part of anything that is.
        layout: What is cut. In layers on slices gradients of whole tensors are terms of a sum, and nothing is kept in parts.
        num_tp_ranks: Ranks, that each keep an equal part [count].
    """
    layers = [layer for chain in layout.chains for layer in chain.layers]
    around = {region.scope for region in layout.regions if not region.is_apart}
    found: dict[str, dict[int, Cut]] = {}
    for key in keys:
        scope, own = _user_of(trace, key), _cut_of(tuple(trace.parameters[key].shape), num_tp_ranks)
        is_near = scope in around or any(is_inside(scope, layer) or is_inside(layer, scope) for layer in layers)
        if scope and own is not None and not is_near and trace.work_of(scope) <= MAX_FUNCTIONS:
            found.setdefault(scope, {})[key] = own
    regions: list[tuple[Region, set[int]]] = []
    for scope, cuts in found.items():
        names = {name: cut for key, cut in cuts.items() for name in trace.names[key]}
        regions.append((Region(scope=scope, num_units=num_tp_ranks, cuts=names, roles={scope: "stored"}), set(cuts)))
    return sorted(regions, key=lambda pair: -sum(trace.parameters[key].numel() for key in pair[1]))


def _user_of(trace: Trace, key: int) -> str:
    """Return the innermost module that holds a parameter and was running at each use of it, called once or twice; else ""."""
    paths = list(trace.uses.get(key, ()))
    common = [same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, zip(*paths, strict=False))]
    for path in reversed(common):
        if trace.num_calls[path] <= MOST_CALLS and all(is_inside(name, path) for name in trace.names[key]):
            return path  # "" for the model itself
    return ""


def _cut_of(shape: tuple[int, ...], num_tp_ranks: int) -> Cut | None:
    """Return the cut of a matrix along the first dim that the ranks divide; None for vectors, and where they divide none."""
    if sum(size > 1 for size in shape) < 2:
        return None
    dim = next((dim for dim, size in enumerate(shape) if size and size % num_tp_ranks == 0), None)
    return None if dim is None else Cut(dim=dim, groups=(shape[dim],), kind="stored")
