"""Offsets of parameters in a unit's flat memory, and the rank that owns each segment. Numbers only, no tensors.

Flat memory is cut into one equal segment for each rank that shares it; segment r is rank r's. There are two ways to fill it:

- *even*: parameters one after the other; a cut may go through a parameter. All ranks hold equal shares to within a few
  elements. This is for optimizers that treat each element by itself.
- *whole*: no parameter is cut; each lies in the segment of one owner. The largest are placed first, each in the emptiest
  segment. This is for optimizers that need whole matrices (Muon, Adafactor, Shampoo).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

__all__: list[str] = []

ALIGNMENT = 16
"""A parameter begins at a multiple of so many elements: 64 bytes of float32, a cache line, what vector kernels like."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The interval of one parameter that lies in one segment."""

    index: int
    """The parameter's place in the unit."""
    start: int
    """Its first element, counted in the parameter's memory order."""
    stop: int
    """One past its last element."""
    offset: int
    """Where it begins in the segment [elements]."""

    @property
    def numel(self) -> int:
        """Elements [count]."""
        return self.stop - self.start


class FlatLayout:
    """Offsets of a unit's parameters.

    Args:
        numels: Elements of each parameter [count].
        num_shards: Ranks that share the memory [count].
        keep_whole: Whether a parameter may not be cut.

    >>> layout = FlatLayout([30, 10], num_shards=2, keep_whole=False)
    >>> layout.offsets, layout.segment_numel
    ((0, 32), 32)
    >>> layout.spans(1)
    (Span(index=1, start=0, stop=10, offset=0),)
    """

    def __init__(self, numels: Sequence[int], num_shards: int, *, keep_whole: bool) -> None:
        self.numels = tuple(numels)
        self.num_shards = num_shards
        if keep_whole:
            offsets, self.segment_numel = _place_whole(self.numels, num_shards)
        else:
            offsets, self.segment_numel = _place_evenly(self.numels, num_shards)
        self.offsets = tuple(offsets)
        self.order = tuple(sorted(range(len(offsets)), key=offsets.__getitem__))
        """The parameters' places in the unit, in the order in which they lie in memory."""

    @property
    def numel(self) -> int:
        """Elements of all segments, including padding [count]."""
        return self.segment_numel * self.num_shards

    def spans(self, shard: int) -> tuple[Span, ...]:
        """Return the spans of a segment, in memory order; parameters without elements have none."""
        begin, end = shard * self.segment_numel, (shard + 1) * self.segment_numel
        found = []
        for index in self.order:
            offset = self.offsets[index]
            first, last = max(offset, begin), min(offset + self.numels[index], end)
            if first < last:
                found.append(Span(index, first - offset, last - offset, first - begin))
        return tuple(found)

    def ends(self) -> list[int]:
        """Return the end of each segment in the concatenated parameters, in memory order, without padding [elements]."""
        ends, total = [], 0
        for shard in range(self.num_shards):
            total += sum(span.numel for span in self.spans(shard))
            ends.append(total)
        return ends


def _round_up(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT


def _place_evenly(numels: Sequence[int], num_shards: int) -> tuple[list[int], int]:
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += _round_up(numel)
    return offsets, _round_up(-(-end // num_shards))


def _place_whole(numels: Sequence[int], num_shards: int) -> tuple[list[int], int]:
    loads = [0] * num_shards
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = min(range(num_shards), key=loads.__getitem__)
        loads[owners[index]] += _round_up(numels[index])
    segment = max(loads, default=0)
    ends = [shard * segment for shard in range(num_shards)]
    offsets = []
    for index, numel in enumerate(numels):
        offsets.append(ends[owners[index]])
        ends[owners[index]] += _round_up(numel)
    return offsets, segment
