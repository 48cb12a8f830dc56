"""Facts about the parameters of sharded units, for user code that reads them between steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from meshwright.apply.data.flat_unit import WRITE_WHOLE, FlatUnit
from meshwright.apply.shards.facts import RunMoment, ShardFacts

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
