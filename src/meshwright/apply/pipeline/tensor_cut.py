"""Tensor parallelism inside stages: the part of a layout that applies to a rank's own layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn

from meshwright.apply.pipeline.tracing.call_trace import Flow
from meshwright.apply.pipeline.tracing.stage_map import StageMap
from meshwright.apply.tensor.tensor_layout import Chain, Region, TensorLayout, is_inside
from meshwright.errors import ApplyError

__all__: list[str] = []

_ALONE = {"vocabulary", "head", "gathered"}
"""Roles whose module takes and gives whole tensors by itself, or slices that know how to become whole."""


def see_calls_around(layout: TensorLayout, look: Callable[..., Flow], num_stages: int) -> tuple[Flow, TensorLayout]:
    """Return the calls of a forward, and the layout without what is cut across several of its layers.

    Modules stay in one piece where shards, or slices of the sequence, pass between their parts. A module of shards is split
    where the model has too few layers otherwise: its forward runs on every stage then, and what is cut across it stays whole.

    Args:
        layout: What will be cut.
        look: Returns the calls of a forward with modules that stay in one piece, `closed`; every rank calls it.
        num_stages: Stages that the model will be cut into [count].

    Raises:
        ApplyError: No region is left.
    """
    scopes = {region.scope for region in layout.regions if not _is_apart(region)}
    closed = scopes | {layer for chain in layout.chains for layer in chain.layers}
    flow, opened = look(closed=closed), set[str]()
    while len(flow.calls) < num_stages and (large := closed & scopes & set(flow.units)):
        closed -= large
        opened |= large
        flow = look(closed=closed)
    return flow, _without_spanning(layout, flow.units, opened)


def _without_spanning(layout: TensorLayout, units: Sequence[str], opened: Collection[str]) -> TensorLayout:
    """Drop regions of opened scopes, and those that begin and end at a module around several units: it runs on every stage."""
    spanning = [
        region
        for region in layout.regions
        if region.scope in opened or any(_spans(name, units) for name in region.roles)
    ]
    if not spanning:
        return layout
    reason = "cut together with layers of other stages"
    whole = {name: reason for region in spanning for name in region.cuts}
    rest = tuple(region for region in layout.regions if region not in spanning)
    if not rest:
        raise ApplyError(
            "tensor parallelism can cut this model only across layers of several stages, and nothing within one stage",
            fix="use tp=1, or pp=1",
        )
    return layout.replace(regions=rest, whole={**layout.whole, **whole})


def _spans(name: str, units: Sequence[str]) -> bool:
    return sum(is_inside(unit, name) for unit in units) > 1


def units_together(layout: TensorLayout, units: Sequence[str]) -> list[set[str]]:
    """Return sets of units that must share a stage: shards pass between the columns and rows of one region."""
    found = []
    for region in layout.regions:
        members = {unit for unit in units for name in region.roles if is_inside(name, unit)}
        if not _is_apart(region) and len(members) > 1:
            found.append(members)
    return found


def _is_apart(region: Region) -> bool:
    return set(region.roles.values()) <= _ALONE


def restrict(
    layout: TensorLayout, stage_map: StageMap, own: Collection[int], tensors: Mapping[str, object]
) -> TensorLayout:
    """Return the part of a layout that concerns what this rank holds.

    Args:
        layout: The whole model's.
        stage_map: Which stage runs what.
        own: The stages of this rank.
        tensors: FQN -> the parameters and buffers that this rank holds, under all their names.
    """
    units = [name for name, stages in stage_map.calls.items() if set(stages) & set(own)]

    def runs_here(name: str) -> bool:
        return any(is_inside(name, unit) for unit in units)

    def held(name: str) -> bool:
        # A parameter may be held for another stage, which shares a layer around it: its copies are cut alike.
        # Every rank has the buffers of all units, and writes those of its own.
        return name in tensors and (
            isinstance(tensors[name], nn.Parameter)
            or runs_here(name)
            or not any(is_inside(name, unit) for unit in stage_map.calls)
        )

    regions = []
    for region in layout.regions:
        cuts = {name: cut for name, cut in region.cuts.items() if held(name)}
        if not cuts:
            continue
        regions.append(
            region.replace(
                cuts=cuts,
                roles={name: role for name, role in region.roles.items() if runs_here(name) or name == region.scope},
                integers=tuple(pair for pair in region.integers if runs_here(pair[0]) or pair[0] == region.scope),
                partial=tuple(name for name in region.partial if name in tensors),
                once=tuple(name for name in region.once if name in tensors),
                shared={name: units for name, units in region.shared.items() if runs_here(name)},
            )
        )
    chains = [piece for chain in layout.chains for piece in _pieces(chain, stage_map, own, tensors)]
    return TensorLayout(
        regions=tuple(regions),
        chains=tuple(chains),
        whole={name: reason for name, reason in layout.whole.items() if name in tensors},
    )


def _pieces(chain: Chain, stage_map: StageMap, own: Collection[int], tensors: Mapping[str, object]) -> list[Chain]:
    """Split a chain's layers by stage: between two stages the stream is whole."""
    found = []
    for stage, names in itertools.groupby(chain.layers, lambda name: _stage_of(name, stage_map)):
        layers = tuple(names)
        if stage in own:
            partial = tuple(n for n in chain.partial if n in tensors and any(is_inside(n, layer) for layer in layers))
            found.append(chain.replace(layers=layers, partial=partial))
    return found


def _stage_of(layer: str, stage_map: StageMap) -> int:
    return next(stages[0] for unit, stages in stage_map.calls.items() if is_inside(layer, unit))
