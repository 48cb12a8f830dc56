"""Order in which all ranks gather units and sum their gradients, as lists of numbers without tensors. See `gathering.py`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

__all__: list[str] = []

GATHER, REDUCE = "gather", "reduce"
Action = tuple[str, int]
"""("gather" or "reduce", index of the unit)."""


def forward_order(gathered: Iterable[int]) -> list[Action]:
    """Return the gathers of a forward that calls units in the order of their registration."""
    return [(GATHER, index) for index in sorted(gathered)]


def backward_order(uses: Sequence[int], gathered: Container[int], trainable: Container[int]) -> list[Action]:
    """Return the gathers and sums of the backward of a forward that used units in this order.

    Backward needs a unit first for its last use, and has its gradients when it has passed its first use. So a unit used at both
    ends of the forward (a tied embedding) is gathered early and summed late; the others follow one after the other.

    Args:
        uses: Indices of units in the order of their uses, at least the first and the last use of each.
        gathered: Units that must be made whole.
        trainable: Units that get gradients.

    >>> backward_order([0, 1, 2, 0], gathered={0, 1, 2}, trainable={0, 1, 2})
    [('gather', 0), ('gather', 2), ('gather', 1), ('reduce', 2), ('reduce', 1), ('reduce', 0)]
    """
    first_use: dict[int, int] = {}
    for place, index in enumerate(uses):
        first_use.setdefault(index, place)
    order: list[Action] = []
    met: set[int] = set()
    waiting: list[int] = []
    for place in reversed(range(len(uses))):
        index = uses[place]
        if index not in met and index in gathered:
            order.append((GATHER, index))
        met.add(index)
        order.extend((REDUCE, done) for done in waiting)
        waiting = [index] if place == first_use[index] and index in trainable else []
    return order + [(REDUCE, done) for done in waiting]


def complete(events: Sequence[Action], gathered: Iterable[int], trainable: Iterable[int]) -> list[Action]:
    """Return an order with every unit: first what the leading rank did, then the units that it did not need."""
    rest = forward_order(gathered) + [(REDUCE, index) for index in sorted(trainable)]
    return [*events, *(action for action in rest if action not in events)]


class Uses:
    """First and last use of each unit in a pass."""

    def __init__(self) -> None:
        self._now = 0
        self._times: dict[int, tuple[int, int]] = {}

    def note(self, index: int) -> None:
        """Record a use."""
        self._now += 1
        self._times[index] = self._times.get(index, (self._now, 0))[0], self._now

    def in_order(self) -> list[int]:
        """Return the unit of each first and each last use, in chronological order."""
        times = sorted({(time, index) for index, pair in self._times.items() for time in pair})
        return [index for _, index in times]
