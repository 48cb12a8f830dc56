"""Buffers on every rank of a pipeline: each as that stage has it which writes it last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.buffers import persistent_buffers
from meshwright.apply.pipeline.collect import Collector
from meshwright.apply.pipeline.own_state import OwnState
from meshwright.apply.pipeline.stages import StageMap
from meshwright.apply.pipeline.values import value_of

__all__: list[str] = []


def modules_around(module: nn.Module, units: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules that are no part of a unit: their code runs on every stage."""
    inside = {id(child) for name in units for child in module.get_submodule(name).modules()}
    return [(name, child) for name, child in module.named_modules() if id(child) not in inside]


def spread_buffers(
    module: nn.Module,
    stage_map: StageMap,
    collector: Collector,
    rank_of_stage: Callable[[int], int],
    mine: tuple[OwnState | None, Collection[int]],
) -> None:
    """Give every rank the buffers of the model's own forward, and those of units.

    Args:
        module: The model.
        stage_map: Which stage runs what.
        collector: Gives all ranks what one has.
        rank_of_stage: Stage -> the pipe's rank that holds it.
        mine: What the stages of this rank have each for itself, and these stages.
    """
    for _, child in modules_around(module, tuple(stage_map.calls)):
        for key in child._buffers:
            _spread_own(child, key, collector, rank_of_stage, mine)
    sources = {name: rank_of_stage(calls[-1]) for name, calls in stage_map.calls.items()}
    _spread_of_units(module, sources, collector)


def _spread_of_units(module: nn.Module, sources: Mapping[str, int], collector: Collector) -> None:
    """Give every rank the buffers of units as the rank has them that runs the unit: a cache may have grown there alone."""
    own = {name: _describe(module.get_submodule(name)) for name in sources}
    everyone = collector.told(own)
    for name, source in sources.items():
        unit = module.get_submodule(name)
        for path, (shape, dtype, persistent) in everyone[source][name].items():
            prefix, _, key = path.rpartition(".")
            owner = unit.get_submodule(prefix)
            present = owner._buffers.get(key)
            if present is not None and own[name].get(path) == [shape, dtype, persistent]:
                present.copy_(collector.tensor(present, source))
                continue
            new = collector.tensor(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), source)
            if key in owner._buffers or not hasattr(owner, key):
                owner.register_buffer(key, new, persistent=persistent)


def _describe(unit: nn.Module) -> dict[str, list[Any]]:
    """Return path -> [shape, dtype, whether a state dict has it] of each buffer that has entries, each once."""
    persistent = {name for name, _ in persistent_buffers(unit)}
    return {
        name: [list(buffer.shape), str(buffer.dtype).removeprefix("torch."), name in persistent]
        for name, buffer in unit.named_buffers()
        if buffer.numel()
    }


def _spread_own(
    child: nn.Module,
    key: str,
    collector: Collector,
    rank_of_stage: Callable[[int], int],
    mine: tuple[OwnState | None, Collection[int]],
) -> None:
    """Spread a buffer that the code between layers writes, where a stage computes it; else every rank has it."""
    own_state, own = mine
    buffer = child._buffers[key]
    value = None if buffer is None else value_of(buffer)
    if buffer is None or value is None or value.home is None or not buffer.numel():
        return
    if own_state is not None and value.home in own:
        own_state.enter(value.home)
        buffer = child._buffers[key]
    if buffer is None:
        return
    with torch.no_grad():
        new = collector.tensor(buffer, rank_of_stage(value.home))
        if value.home not in own:
            buffer.copy_(new)
