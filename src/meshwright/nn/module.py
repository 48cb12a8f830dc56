"""Base class of the parallel modules: layouts, and conversion to full tensors and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshwright.comm.communicator import Communicator
from meshwright.errors import ConfigError
from meshwright.layout import ShardLayout, even_sizes
from meshwright.nn.shards import gather_full, take_shard
from meshwright.values import Problems

__all__: list[str] = []


class ShardedModule(nn.Module):
    """A module whose parameters are shards of full tensors, spread over the ranks of a group.

    Args:
        group: The ranks that share the module.
        sequence_parallel: Whether activations outside are slices of the sequence.
        sequence_dim: The dim of the sequence in activations [..., sequence, features].
    """

    def __init__(self, *, group: Communicator, sequence_parallel: bool, sequence_dim: int) -> None:
        super().__init__()
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of the module, for averaged weights say, uses the same group; a process group cannot be copied.
        memo[id(self.group)] = self.group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def layout_of(self, name: str, part: int) -> ShardLayout:
        """Return the layout of a parameter on one rank of the group.

        Args:
            name: "weight" or "bias".
            part: The rank, counted in the group.
        """
        raise NotImplementedError

    def layouts(self) -> dict[str, ShardLayout]:
        """Return which part of which full tensor each parameter is on this rank.

        Returns:
            Layouts by the parameters' names; the names, and the full shapes, are those of the module for one device.
        """
        return {name: self.layout_of(name, self.group.group_rank) for name, _ in self.named_parameters()}

    def gather_full(self, name: str, shard: Tensor) -> Tensor:
        """Put a full tensor together from what the ranks hold beside a parameter. All ranks of the group call it.

        Args:
            name: The parameter.
            shard: This rank's part: the parameter itself, its gradient, or state of the optimizer of its shape.

        Returns:
            The full tensor, on every rank, detached.
        """
        return gather_full(shard, [self.layout_of(name, part) for part in range(self.group.size)], self.group)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the full parameters, on every rank. All ranks of the group call it.

        Returns:
            What `state_dict` of the module for one device would return, in its shapes, detached.
        """
        return {name: self.gather_full(name, parameter) for name, parameter in self.named_parameters()}

    def load_full_state_dict(self, full: Mapping[str, Tensor]) -> None:
        """Keep this rank's parts of full parameters. Exchanges nothing.

        Args:
            full: What `full_state_dict`, or `state_dict` of the module for one device, returned; tensors have the full shapes.

        Raises:
            ConfigError: A parameter is missing, unknown, or of another shape.
        """
        layouts = self.layouts()
        problems = Problems("full state")
        for name in sorted(full.keys() ^ layouts.keys()):
            problems.add(f"'{name}' is {'missing' if name in layouts else 'unknown'} (rule: {', '.join(layouts)})")
        problems.check()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(take_shard(full[name], layouts[name]))

    def adopt_full(self, full: Mapping[str, Tensor | None]) -> None:
        """Make parameters of this rank's parts of full ones: their values, dtype, device and `requires_grad`."""
        for name, layout in self.layouts().items():
            tensor = full[name]
            if tensor is not None:
                setattr(self, name, nn.Parameter(take_shard(tensor, layout), requires_grad=tensor.requires_grad))

    def shares(self, size: int) -> tuple[int, ...]:
        """Return every rank's share of so many entries, in group order: even, the first ranks have one more."""
        return even_sizes(size, self.group.size)


def check_sizes(subject: str, **sizes: int) -> None:
    """Refuse sizes below 1 by their names.

    Raises:
        ConfigError: A size is below 1; the message has all of them.
    """
    problems = Problems(subject)
    for name, size in sizes.items():
        problems.require(size >= 1, f"{name}={size} (rule: {name} is at least 1)", fix=f"{name}=1")
    problems.check()


def check_indices(indices: Tensor, size: int, what: str) -> None:
    """Refuse an index outside 0 .. size - 1, where looking at the values costs nothing: on the CPU.

    A GPU would have to stop for it. There the callers turn such an index into one that the device's own check finds.

    Raises:
        ConfigError: An index is outside; raised on every rank, since all have the same indices.
    """
    if indices.device.type != "cpu" or not indices.numel():
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(indices))
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise ConfigError(f"{what} {wrong} is out of range (rule: 0 <= {what} < {size})")
