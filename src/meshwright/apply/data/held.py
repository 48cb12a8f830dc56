"""Parameters of sharded units: facts for user code that reads them between steps, and the parts that a checkpoint saves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

import torch

from meshwright.apply.data.flat_unit import WRITE_WHOLE, FlatUnit, Piece
from meshwright.apply.held_state import HeldPart, memory_order
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.layout import ShardLayout

__all__: list[str] = []


def held_parts(units: Sequence[FlatUnit], axis: str, moment: RunMoment) -> list[tuple[torch.Tensor, ShardFacts]]:
    """Return all parameters whose gradients or values are in other memory, and the optimizer's pieces of them.

    Args:
        units: The sharded units.
        axis: The setting of the plan that shards them, as in "zero=3".
        moment: The phase of the run.
    """
    found: list[tuple[torch.Tensor, ShardFacts]] = []
    for number, unit in enumerate(units):
        for index, (name, parameter) in enumerate(zip(unit.names, unit.parameters, strict=True)):
            facts = ShardFacts(
                name=f"parameter '{name}'",
                held=f"a rank has a part of its values alone between steps ({axis}), in other memory",
                moment=moment,
                values="none" if unit.is_gathered else "whole",
                key=(axis, name),
                axis=axis,
                is_cut=unit.is_gathered,
                gradient_is_elsewhere=functools.partial(unit.has_gradient, index),
                write=WRITE_WHOLE,
            )
            found.append((parameter, facts))
        for piece in unit.pieces:
            name, span = unit.names[piece.span.index], piece.span
            facts = ShardFacts(
                name=f"the optimizer's piece of parameter '{name}'",
                held=f"this rank's optimizer has {span.numel} of its {unit.layout.numels[span.index]} entries ({axis})",
                moment=moment,
                values="shard",
                key=(axis, number, span.index, span.start),
                axis=axis,
                is_piece=True,
            )
            found.append((piece.tensor, facts))
    return found


def held_state(units: Sequence[FlatUnit]) -> list[HeldPart]:
    """Return this rank's pieces of the units' parameters, and parameters without entries, which nobody has a piece of."""
    found: list[HeldPart] = []
    for unit in units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            if not parameter.numel():
                found.append(HeldPart.whole(name, parameter))
        for piece in unit.pieces:
            found.append(_held_piece(unit, piece))
    return found


def _held_piece(unit: FlatUnit, piece: Piece) -> HeldPart:
    span, name = piece.span, unit.names[piece.span.index]
    shape, strides = unit.memory_format(span.index)
    if tuple(piece.tensor.shape) == shape and piece.tensor.stride() == strides:
        return HeldPart.whole(name, piece.tensor)
    order = memory_order(strides, shape)
    turned = tuple(shape[dim] for dim in order) if order else shape
    layout = ShardLayout(shape=turned, flat=(span.start, span.stop))
    return HeldPart(name=name, layout=layout, tensor=piece.tensor, owner=piece.tensor, order=order)


def raise_recast(group: Communicator, device: torch.device, zero: int, mine: str | None) -> NoReturn:
    """Raise ApplyError, on every rank, about a parameter whose gradient came in another dtype on some rank."""
    names = group.all_gather_json(mine, device=device)
    name = next(name for name in names if name is not None)
    raise ApplyError(
        f"a forward changed the dtype of parameter '{name}' (by module.to(...), say), and zero={zero} keeps values and gradients "
        "in the memory and dtype that they had when the plan was applied",
        fix="build the model with that parameter in the dtype that its forward wants, or use zero=0",
    )
