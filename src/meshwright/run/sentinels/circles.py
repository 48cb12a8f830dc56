"""Circles: ranks that must have the same values, checked by one sum over all ranks.

Each rank adds its digest times a factor: 1, or for the last rank of its circle minus the number of the others. Equal digests add
up to 0. Two different digests never do, since no proper subset of the factors cancels. Each circle has its own weight, so that
batches exchanged between two circles do not cancel either. A digest is sent in three parts of 21 bits: over 16,384 ranks each sum
stays below 2^50, and float64 adds them exactly in any order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from meshwright.mesh import MeshSpec

__all__: list[str] = []

NUM_PARTS = 3
"""Numbers that a digest takes in a sum [count]."""
_BITS = 21


@dataclasses.dataclass(frozen=True)
class Circle:
    """The ranks that must have the same values as this one.

    Args:
        ranks: Global ranks, ascending; this one among them.
        rank: This rank.
    """

    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def over(cls, mesh: MeshSpec, rank: int, *axes: str) -> Circle:
        """Return the ranks that differ from this one only on these axes."""
        return cls(mesh.group(*axes, rank=rank), rank)

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the circle's only one."""
        return len(self.ranks) == 1

    def terms(self, digest: int) -> list[float]:
        """Return this rank's terms of the sum for a 64-bit digest (the highest bit is left out)."""
        factor = self.factor
        return [float(factor * (digest >> shift & 2**_BITS - 1)) for shift in (0, _BITS, 2 * _BITS)]

    @functools.cached_property
    def factor(self) -> int:
        """Factor of this rank's digests."""
        weight = 1 + self.ranks[0]
        return -weight * (len(self.ranks) - 1) if self.rank == self.ranks[-1] else weight

    def others(self, values: Sequence[object]) -> list[int]:
        """Return the ranks of the circle whose value differs from that of most of them.

        Args:
            values: Of each rank of the world, by rank.
        """
        mine = [values[rank] for rank in self.ranks]
        usual = max(mine, key=mine.count)
        return [rank for rank in self.ranks if values[rank] != usual]


def circles_of(mesh: MeshSpec, *axes: str) -> list[Circle]:
    """Return all circles of ranks that differ only on these axes, to check something in every one of them."""
    return [Circle(ranks, ranks[0]) for ranks in mesh.groups(*axes)]
