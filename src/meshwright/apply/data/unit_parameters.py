"""Choice of a unit's parameters: those of one layer, dtype and device, either all trainable or none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.apply.data.flat_unit import FlatUnit
from meshwright.apply.data.sharding import Sharding
from meshwright.apply.modules.compiled import refuse_compiled
from meshwright.apply.state.assigned import assigned_parameters, parameters_in_containers
from meshwright.comm.compression.reducer import Reducer
from meshwright.describe.layers import find_layers

__all__: list[str] = []

Named = tuple[str, nn.Parameter]


def cut_into_units(
    module: nn.Module, dense: Sequence[Named], sharding: Sharding, within: Reducer, *, keep_whole: bool
) -> tuple[list[FlatUnit], list[nn.Module]]:
    """Return the units of a model's parameters, and the layer that owns each.

    Args:
        module: The model.
        dense: Its parameters with dense gradients, each once.
        sharding: Settings of ZeRO, with the shard group and the replica group.
        within: Sums gradients over the ranks that hold shards.
        keep_whole: Whether each parameter lies on one rank only, as an optimizer of whole matrices requires.

    Raises:
        ApplyError: A layer is compiled, and its values would have to be exchanged between calls of its layers.
    """
    if sharding.zero == 3:
        refuse_compiled(module, "ZeRO-3 exchanges its values between calls of its layers")
    units: list[FlatUnit] = []
    owners: list[nn.Module] = []
    # What a forward sets, each rank sets alike in the whole; of what is put together for a call alone it would be lost.
    assigned = assigned_parameters(module) if sharding.zero == 3 else set[int]()
    for owner, members in _layers(module, dense, sharding):
        kinds: dict[tuple[torch.dtype, torch.device, bool, bool], list[Named]] = {}
        for name, parameter in members:
            key = parameter.dtype, parameter.device, parameter.requires_grad, id(parameter) in assigned
            kinds.setdefault(key, []).append((name, parameter))
        for (*_, is_assigned), kind in kinds.items():
            size = sum(parameter.nbytes for _, parameter in kind)
            unit = FlatUnit(
                kind,
                sharding,
                within,
                keep_whole=keep_whole,
                is_gathered=sharding.zero == 3 and not is_assigned and size >= max(1, sharding.whole_below),
            )
            units.append(unit)
            owners.append(owner)
    return units, owners


def _layers(module: nn.Module, dense: Sequence[Named], sharding: Sharding) -> list[tuple[nn.Module, Sequence[Named]]]:
    """Return (module, its parameters) for each set that is gathered and reduced together; each parameter once.

    ZeRO-1 touches everything at once at the end of the step, so it has one layer.
    """
    if sharding.zero == 1:
        return [(module, dense)]
    # The whole model gathers what code reads by a container: its layer may be run by `layer.forward`, which calls no hooks.
    owner_of = dict.fromkeys(parameters_in_containers(module) if sharding.zero == 3 else (), module)
    for _, layer in find_layers(module):
        for parameter in layer.parameters():
            owner_of.setdefault(id(parameter), layer)
    members: dict[int, tuple[nn.Module, list[Named]]] = {}
    for name, parameter in dense:
        owner = owner_of.get(id(parameter), module)
        members.setdefault(id(owner), (owner, []))[1].append((name, parameter))
    return [*members.values()]
