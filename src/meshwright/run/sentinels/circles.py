"""Circles: ranks that must say the same, and how a sum over all ranks tells whether they do.

Each rank adds its digest times a factor: 1, and for the last rank of its circle minus the number of the others. Where all
say the same, a circle adds up to nothing; where they say two things, to something else for certain, as every group of ranks
but all of them has factors that do not cancel. Each circle has a weight of its own, so that batches that two circles have
exchanged do not cancel either. A digest goes in three parts of 21 bits: over 16,384 ranks each sum stays below 2^50, and
float64 adds them exactly in any order.
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
    """The ranks that must say the same as this one.

    Args:
        ranks: Global ranks, ascending; this one among them.
        rank: This rank.
    """

    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def over(cls, mesh: MeshSpec, rank: int, *axes: str) -> Circle:
        """Return the ranks that differ from this one on these axes alone."""
        return cls(mesh.group(*axes, rank=rank), rank)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to differ from."""
        return len(self.ranks) == 1

    def terms(self, digest: int) -> list[float]:
        """Return what this rank adds to the sum for a digest of 64 bits (the topmost is left out)."""
        factor = self.factor
        return [float(factor * (digest >> shift & 2**_BITS - 1)) for shift in (0, _BITS, 2 * _BITS)]

    @functools.cached_property
    def factor(self) -> int:
        """What this rank's digests are multiplied by."""
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
    """Return all circles of ranks that differ on these axes alone, for what is said about every one of them."""
    return [Circle(ranks, ranks[0]) for ranks in mesh.groups(*axes)]
