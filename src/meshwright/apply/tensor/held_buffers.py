"""Buffers of which each rank has a part, and tensors that a script assigns in their place between steps."""

from __future__ import annotations

from torch import Tensor

from meshwright._torch_private import without_function_subclasses
from meshwright.errors import ApplyError
from meshwright.layout import ShardLayout
from meshwright.nn.shards import take_shard

__all__: list[str] = []


class HeldBuffer:
    """One buffer of which each rank has a part.

    Args:
        name: Its FQN.
        slots: The buffer dict of its module.
        own: Its name there.
        layout: This rank's part of it.
    """

    def __init__(self, name: str, slots: dict[str, Tensor | None], own: str, layout: ShardLayout) -> None:
        self._name = name
        self._slots = slots
        self._own = own
        self._layout = layout
        self._tensor = slots[own]

    def take_replacement(self) -> None:
        """Copy this rank's part of a tensor assigned in the buffer's place into the buffer, and keep the buffer object.

        Raises:
            ApplyError: The tensor is neither whole nor computed from this rank's part.
        """
        found, tensor = self._slots.get(self._own), self._tensor
        if found is tensor or tensor is None:
            return
        if found is None or tuple(found.shape) not in (self._layout.shape, tuple(tensor.shape)):
            what = "None" if found is None else f"a tensor of shape {list(found.shape)}"
            raise ApplyError(
                f"{what} was assigned to the buffer '{self._name}', of which the ranks have parts of shape {list(tensor.shape)}",
                fix=f"assign a tensor of its whole shape {list(self._layout.shape)}, alike on every rank, or of its own entries",
            )
        with without_function_subclasses():
            values = found.detach().as_subclass(Tensor)
            if tuple(values.shape) == self._layout.shape:
                values = take_shard(values, self._layout)
            tensor.data = values.to(tensor.device).clone()
        self._slots[self._own] = tensor
