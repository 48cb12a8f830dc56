"""Tied parameters, used by several stages: each stage holds an equal copy, and the copies' gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from meshwright.apply.gradient_sums import sum_gradients
from meshwright.apply.state.buffers import holds_values
from meshwright.comm.communicator import Communicator

__all__: list[str] = []


class TiedGradients:
    """The parameters of which several ranks of a pipeline hold a copy.

    Args:
        places: FQN -> the pipeline's ranks that hold the parameter.
        parameters: FQN -> parameter, of the whole model.
        make_group: (places in the pipeline) -> the group of the ranks there; every rank calls it.
        rank: This process's global rank.
    """

    def __init__(
        self,
        places: Mapping[str, Sequence[int]],
        parameters: Mapping[str, nn.Parameter],
        make_group: Callable[[Sequence[int]], Communicator],
        rank: int,
    ) -> None:
        tied = {name: tuple(held) for name, held in places.items() if len(held) > 1}
        groups = {held: make_group(held) for held in sorted(set(tied.values()))}
        self.names = tuple(tied)
        """FQNs of all that are tied."""
        self._own: dict[Communicator, list[tuple[str, nn.Parameter]]] = {}
        for name, held in tied.items():
            if rank in groups[held].ranks and groups[held].size > 1:
                self._own.setdefault(groups[held], []).append((name, parameters[name]))
        self.counted_elsewhere = frozenset(
            id(parameter) for group, named in self._own.items() if group.group_rank > 0 for _, parameter in named
        )
        """Ids of the parameters whose gradient another rank counts in the norm."""

    def copies(self) -> list[tuple[Communicator, list[tuple[str, torch.Tensor]]]]:
        """Return (ranks, [(FQN, parameter)]) of the parameters of which several ranks hold a full copy."""
        return [
            (group, [(name, parameter) for name, parameter in named if holds_values(parameter)])
            for group, named in self._own.items()
        ]

    def sum(self) -> None:
        """Sum the gradients of all copies into each copy; a parameter that no copy has used keeps `grad=None`."""
        for group, named in self._own.items():
            sum_gradients([parameter for _, parameter in named], group)
