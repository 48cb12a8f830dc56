"""Tied parameters, used by several stages: each stage holds an equal copy, and the copies' gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import nn

from meshwright.apply.gradient_sums import sum_gradients
from meshwright.apply.state.buffers import holds_values
from meshwright.comm.communicator import Communicator

__all__: list[str] = []


class TiedGradients:
    """The parameters of which several ranks of a pipeline hold a copy.

    Args:
        tied: FQN -> (the ranks that hold a copy, the parameter), of all that are tied in the model.
        rank: This process's global rank.
    """

    def __init__(self, tied: Mapping[str, tuple[Communicator, nn.Parameter]], rank: int) -> None:
        self.names = tuple(tied)
        """FQNs of all that are tied."""
        self._own: dict[Communicator, list[nn.Parameter]] = {}
        self._own_names: dict[Communicator, list[str]] = {}
        for name, (group, parameter) in tied.items():
            if rank in group.ranks and group.size > 1:
                self._own.setdefault(group, []).append(parameter)
                self._own_names.setdefault(group, []).append(name)
        self.counted_elsewhere = frozenset(
            id(parameter) for group, parameters in self._own.items() if group.group_rank > 0 for parameter in parameters
        )
        """Ids of the parameters whose gradient another rank counts in the norm."""

    @classmethod
    def over(
        cls,
        places: Mapping[str, Sequence[int]],
        parameters: Mapping[str, nn.Parameter],
        make_group: Callable[[Sequence[int]], Communicator],
        rank: int,
    ) -> Self:
        """Return the tied parameters of one pipeline, with a group for each set of ranks; every rank calls it.

        Args:
            places: FQN -> the pipeline's ranks that hold the parameter.
            parameters: FQN -> parameter, of the whole model.
            make_group: (places in the pipeline) -> the group of the ranks there.
            rank: This process's global rank.
        """
        tied = {name: tuple(held) for name, held in places.items() if len(held) > 1}
        groups = {held: make_group(held) for held in sorted(set(tied.values()))}
        return cls({name: (groups[held], parameters[name]) for name, held in tied.items()}, rank)

    def copies(self) -> list[tuple[Communicator, list[tuple[str, torch.Tensor]]]]:
        """Return (ranks, [(FQN, parameter)]) of the parameters of which several ranks hold a full copy."""
        found: list[tuple[Communicator, list[tuple[str, torch.Tensor]]]] = []
        for group, parameters in self._own.items():
            named = zip(self._own_names[group], parameters, strict=True)
            found.append((group, [(name, parameter) for name, parameter in named if holds_values(parameter)]))
        return found

    def sum(self) -> None:
        """Sum the gradients of all copies into each copy; a parameter that no copy has used keeps `grad=None`."""
        for group, parameters in self._own.items():
            sum_gradients(parameters, group)
