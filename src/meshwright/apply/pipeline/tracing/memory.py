"""Memory that several tensors of a forward share: what one of them is written over with, the others have, too.

On one device it is so by itself. Between stages tensors are copies: code that writes over a tensor of which another stage has a
copy under another name, and uses that one afterwards, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshwright.apply.pipeline.walking.stand_ins import StageValue, StandIn
from meshwright.errors import ApplyError

__all__: list[str] = []


class Memory:
    """What is known of one forward's memory on a stage.

    Args:
        stage: The stage.
    """

    __slots__ = ("_copies", "_moved", "_stage", "is_touched")

    def __init__(self, stage: int) -> None:
        self.is_touched = False
        """Whether there is anything to refuse."""
        self._stage = stage
        self._copies: list[StageValue] = []
        self._moved: set[int] = set()

    def note_copy(self, value: StageValue) -> None:
        """Take note that another stage has the same values."""
        self._copies.append(value)

    def note_written(self, value: StageValue) -> None:
        """Take note that this stage has written over a tensor: copies of others with the same memory are old."""
        place = _place_of(value.real)
        for other in self._copies:
            if other is not value and place and _place_of(other.real) == place:
                other.is_stale = self.is_touched = True

    def note_moved(self, tensor: Tensor) -> None:
        """Take note that another stage has written over its copy of a tensor of this one, which stays as it was."""
        place = _place_of(tensor)
        if place:
            self._moved.add(place)
            self.is_touched = True

    def refuse_stale(self, values: Sequence[StageValue]) -> None:
        """Refuse code that uses what is not up to date.

        Raises:
            ApplyError: It does.
        """
        for value in values:
            is_old = value.home == self._stage and self._moved and _place_of(value.real) in self._moved
            if value.is_stale or is_old:
                raise ApplyError(
                    f"the code between the layers writes over a tensor in place and then uses another one, of shape "
                    f"{list(value.any.shape)}, that shares its memory, and stages other than stage {self._stage} have it, too",
                    fix="write y = y + x in place of y += x, or clone() before; or use pp=1",
                )


def _place_of(tensor: Tensor | None) -> int:
    """Return the address of a tensor's storage; 0 where it has none."""
    if tensor is None or isinstance(tensor, StandIn):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers
        return 0
