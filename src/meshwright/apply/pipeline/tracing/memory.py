"""Memory that several tensors of a forward share, so that a write into one of them changes the others.

On one device this is automatic. Between stages tensors are copies. So code is refused that writes into a tensor and then uses an
alias of which another stage holds a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.apply.pipeline.walking.stand_ins import StageValue, StandIn
from meshwright.errors import ApplyError
from meshwright.trees import end_of_memory, memory_key

__all__: list[str] = []


class Memory:
    """Shared memory of one forward's tensors, as one stage knows it."""

    __slots__ = ("_copies", "_inputs", "_is_of_layer", "_moved", "_stage", "has_inputs", "is_touched")

    def __init__(self, stage: int) -> None:
        self.is_touched = False
        """Whether there is anything to refuse."""
        self.has_inputs = False
        """Whether one stage alone has written into a tensor that each of them has of its own, such as one of the batch."""
        self._inputs: list[tuple[Tensor, StageValue, int | None]] = []
        self._is_of_layer = False
        self._stage = stage
        self._copies: list[tuple[StageValue, Tensor]] = []
        self._moved: dict[int, Tensor] = {}

    def note_copy(self, value: StageValue, tensor: Tensor) -> None:
        """Record that another stage holds a copy of these values, which this one has in a tensor."""
        self._copies.append((value, tensor))

    def note_written(self, value: StageValue) -> None:
        """Record that this stage wrote into a tensor: copies of its aliases on other stages are stale."""
        place = _place_of(value.real)
        for other, tensor in self._copies:
            if other is not value and place and _place_of(tensor) == place:
                other.is_stale = self.is_touched = True

    def note_moved(self, tensor: Tensor) -> None:
        """Record that another stage wrote into its copy of a tensor of this stage; this stage's own is unchanged."""
        place = _place_of(tensor)
        if place:
            self._moved[place] = tensor  # held: another one must not come to lie at its address
            self.is_touched = True

    def note_input(self, tensor: Tensor, value: StageValue, *, by_layer: bool) -> None:
        """Record that one stage has written into a tensor that each of them has of its own.

        Args:
            tensor: The tensor.
            value: What is known of it from now on: the stage that has what was written.
            by_layer: Whether a layer has, and not the code between layers, which all stages run.
        """
        if memory_key(tensor) is not None:
            self._is_of_layer |= by_layer
            self._inputs.append((tensor, value, value.home))
            self.has_inputs = True

    def writer_of(self, tensor: Tensor, *, is_over: bool = False) -> tuple[int, bool] | None:
        """Return the stage that has written into the memory of a tensor of no known home, and whether that has a gradient.

        It alone has the values of the tensor, which on one device is another name of what was written. None where none has.
        `is_over` says that the forward is over: what a layer wrote comes before nothing then.

        Raises:
            ApplyError: Several stages have, and none has the values of all; or a layer has.
        """
        found = [entry[1:] for entry in self._inputs if _overlap(tensor, entry[0])]
        if not found:
            return None
        # One that a later stage wrote into after that is a copy there, apart from this memory.
        homes = {home for value, first in found for home in (value.home, first)}
        home = homes.pop()
        if homes or home is None or (self._is_of_layer and not is_over):
            raise ApplyError(
                f"a layer, or code between layers, writes into a tensor of the batch or a buffer, and another one, of "
                f"shape {list(tensor.shape)}, shares its memory; only the stage that writes has what was written",
                fix="do not write in place there (y = y + x, inplace=False), or clone() before; or use pp=1",
            )
        return home, any(value.any.requires_grad for value, _ in found)

    def refuse_stale(self, values: Sequence[StageValue]) -> None:
        """Refuse code that uses a stale copy.

        Raises:
            ApplyError: It does.
        """
        for value in values:
            is_old = value.home == self._stage and self._moved and _place_of(value.real) in self._moved
            if value.is_stale or is_old:
                raise ApplyError(
                    f"code between the layers writes into a tensor and then uses another one, of shape {list(value.any.shape)}, "
                    f"that shares its memory; other stages than stage {self._stage} have a copy, which the write does not reach",
                    fix="write y = y + x in place of y += x, or clone() before; or use pp=1",
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have an entry of memory in common."""
    key = memory_key(one)
    if key is None or key != memory_key(other):
        return False
    start = min(one.storage_offset(), other.storage_offset())
    marks = torch.zeros(max(end_of_memory(one), end_of_memory(other)) - start, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - start).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - start).any())


def _place_of(tensor: Tensor | None) -> int:
    """Return the address of a tensor's storage; 0 where it has none."""
    if tensor is None or isinstance(tensor, StandIn):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers
        return 0
