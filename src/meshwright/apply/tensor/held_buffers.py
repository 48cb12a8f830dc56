"""Buffers of which each rank has a part, and tensors that a script assigns in their place between steps."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from meshwright._torch_private import without_function_subclasses
from meshwright.errors import ApplyError
from meshwright.layout import ShardLayout
from meshwright.nn.shards import take_shard

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, eq=False)
class HeldBuffer:
    """One buffer of which each rank has a part."""

    name: str
    """Its FQN."""
    slots: dict[str, Tensor | None]
    """The buffer dict of its module."""
    own: str
    """Its name there."""
    tensor: Tensor
    layout: ShardLayout
    """This rank's part of it."""

    def take_replacement(self) -> None:
        """Copy this rank's part of a tensor assigned in the buffer's place into the buffer, and keep the buffer object.

        Raises:
            ApplyError: The tensor is neither whole nor computed from this rank's part.
        """
        found, tensor = self.slots.get(self.own), self.tensor
        if found is tensor:
            return
        if found is None or tuple(found.shape) not in (self.layout.shape, tuple(tensor.shape)):
            what = "None" if found is None else f"a tensor of shape {list(found.shape)}"
            raise ApplyError(
                f"{what} was assigned to the buffer '{self.name}', of which the ranks have parts of shape {list(tensor.shape)}",
                fix=f"assign a tensor of its whole shape {list(self.layout.shape)}, alike on every rank, or of its own entries",
            )
        with without_function_subclasses():
            values = found.detach().as_subclass(Tensor)
            if tuple(values.shape) == self.layout.shape:
                values = take_shard(values, self.layout)
            tensor.data = values.to(tensor.device).clone()
        self.slots[self.own] = tensor
