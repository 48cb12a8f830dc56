"""Buffers on every rank of a pipeline: each as that stage has it which writes it last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

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
    for name, calls in stage_map.calls.items():
        for buffer in module.get_submodule(name).buffers():
            if buffer.numel():
                buffer.copy_(collector.tensor(buffer, rank_of_stage(calls[-1])))


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
