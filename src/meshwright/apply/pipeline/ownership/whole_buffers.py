"""Buffers on every rank of a pipeline, each with the values of the stage that writes it last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.pipeline.ownership.broadcasts import Collector
from meshwright.apply.pipeline.tracing.call_trace import modules_around
from meshwright.apply.pipeline.tracing.stage_map import StageMap
from meshwright.apply.pipeline.walking.bookkeeping import mark_home
from meshwright.apply.pipeline.walking.stand_ins import mark, value_of
from meshwright.apply.state.buffers import persistent_buffers
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.trees import write_entries

__all__: list[str] = []


class Homes:
    """The stage that computes each buffer of the code between layers, agreed on by all ranks that share a batch.

    A rank whose share is empty runs no forward, and would take its buffers for what every stage has.

    Args:
        module: The model.
        around: The modules that are no part of a unit.
        group: The ranks that share the batch, at one place of the pipeline.
        device: This rank's device.
    """

    def __init__(
        self, module: nn.Module, around: Sequence[nn.Module], group: Communicator, device: torch.device
    ) -> None:
        self._module = module
        self._group = group
        self._device = device
        self._slots = [(child, key) for child in around for key in child._buffers] if group.size > 1 else []

    def agree(self) -> None:
        """Merge what all ranks of the group know; every rank of the group calls it."""
        if not self._slots:
            return
        buffers = [child._buffers.get(key) for child, key in self._slots]
        own = [_home_of(buffer) for buffer in buffers]
        homes = torch.tensor(own, dtype=torch.int64, device=self._device)
        self._group.all_reduce(homes, "max")
        for buffer, mine, home in zip(buffers, own, homes.tolist(), strict=True):
            if buffer is not None and mine != home:
                mark_home(buffer, home, self._module)


def _home_of(buffer: torch.Tensor | None) -> int:
    value = None if buffer is None else value_of(buffer)
    return -1 if value is None or value.home is None else value.home


def spread_buffers(
    module: nn.Module,
    stage_map: StageMap,
    collector: Collector,
    rank_of_stage: Callable[[int], int],
    own: Collection[int],
) -> None:
    """Broadcast the buffers of the code between layers, and those of units, to every rank.

    Args:
        module: The model.
        stage_map: Which stage runs what.
        collector: Gives all ranks what one has.
        rank_of_stage: Stage -> the pipeline's rank that holds it.
        own: The stages of this rank.
    """
    around = dict(modules_around(module, tuple(stage_map.calls)))
    places = [_places(child) for child in around.values()]
    sources = {name: rank_of_stage(calls[-1]) for name, calls in stage_map.calls.items()}
    units = {name: _describe(module.get_submodule(name)) for name in sources}
    everyone = collector.told([places, units])
    for number, child in enumerate(around.values()):
        _spread_own(child, [theirs[0][number] for theirs in everyone], collector, rank_of_stage, own)
    _spread_of_units(module, sources, collector, [theirs[1] for theirs in everyone])


def buffers_elsewhere(
    module: nn.Module,
    stage_map: StageMap,
    collector: Collector,
    rank_of_stage: Callable[[int], int],
    own: Collection[int],
) -> set[int]:
    """Return the ids of the buffers whose values other ranks of the pipeline have; every rank of it calls this.

    The arguments are those of `spread_buffers`.
    """
    around = dict(modules_around(module, tuple(stage_map.calls)))
    everyone = collector.told([_places(child) for child in around.values()])
    found: set[int] = set()
    for number, child in enumerate(around.values()):
        for key, buffer in child._buffers.items():
            homes = [theirs[number][key][0] for theirs in everyone if key in theirs[number]]
            if buffer is not None and homes and max(homes) not in own:
                found.add(id(buffer))
    for name, calls in stage_map.calls.items():
        if rank_of_stage(calls[-1]) not in {rank_of_stage(stage) for stage in own}:
            found |= {id(buffer) for buffer in module.get_submodule(name).buffers()}
    return found


def _places(child: nn.Module) -> dict[str, list[Any]]:
    """Return key -> [stage, shape, dtype] of each buffer that the code between layers has written and a stage computes."""
    found: dict[str, list[Any]] = {}
    for key, buffer in child._buffers.items():
        value = None if buffer is None else value_of(buffer)
        if buffer is not None and value is not None and value.home is not None:
            found[key] = [value.home, list(buffer.shape), str(buffer.dtype).removeprefix("torch.")]
    return found


def _spread_own(
    child: nn.Module,
    everyone: Sequence[Mapping[str, list[Any]]],
    collector: Collector,
    rank_of_stage: Callable[[int], int],
    own: Collection[int],
) -> None:
    """Broadcast the buffers of the code between layers that one stage computes; of all others every rank has its own."""
    for key in dict.fromkeys(key for theirs in everyone for key in theirs):
        home = max(theirs[key][0] for theirs in everyone if key in theirs)
        source = rank_of_stage(home)
        if key not in everyone[source]:
            raise ApplyError(
                f"buffer '{key}' of {type(child).__name__} was changed between steps only on some ranks of a pipeline",
                fix="change buffers on every rank alike, or inside `with model.whole_parameters():`",
            )
        _, shape, dtype = everyone[source][key]
        buffer = child._buffers.get(key)
        like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        if buffer is not None and home in own:
            like = buffer
        new = collector.tensor(like, source)
        if home in own:
            continue
        with torch.no_grad():
            if buffer is not None and list(buffer.shape) == shape and buffer.dtype == new.dtype:
                write_entries(buffer, new)
            else:
                known = None if buffer is None else value_of(buffer)
                child._buffers[key] = new if known is None else mark(new, known)


def _spread_of_units(
    module: nn.Module, sources: Mapping[str, int], collector: Collector, everyone: Sequence[Mapping[str, Any]]
) -> None:
    """Broadcast the buffers of units from the rank that runs the unit: a cache may have grown there alone."""
    own = {name: _describe(module.get_submodule(name)) for name in sources}
    for name, source in sources.items():
        unit = module.get_submodule(name)
        for path, (shape, dtype, persistent) in everyone[source][name].items():
            prefix, _, key = path.rpartition(".")
            owner = unit.get_submodule(prefix)
            present = owner._buffers.get(key)
            if present is not None and own[name].get(path) == [shape, dtype, persistent]:
                write_entries(present, collector.tensor(present, source))
                continue
            new = collector.tensor(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), source)
            if key in owner._buffers or not hasattr(owner, key):
                owner.register_buffer(key, new, persistent=persistent)


def _describe(unit: nn.Module) -> dict[str, list[Any]]:
    """Return path -> [shape, dtype, whether it is persistent] of each buffer with entries, each once."""
    persistent = {name for name, _ in persistent_buffers(unit)}
    return {
        name: [list(buffer.shape), str(buffer.dtype).removeprefix("torch."), name in persistent]
        for name, buffer in unit.named_buffers()
        if buffer.numel()
    }
