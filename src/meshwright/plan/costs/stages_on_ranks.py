"""Stages of a setup placed on ranks."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.stages import rank_of_stage

__all__: list[str] = []


class StagesOnRanks:
    """Stages of a setup, and the ranks that run them."""

    def __init__(self, bounds: Sequence[int], setup: Setup) -> None:
        self.bounds = bounds
        self.num_ranks = setup.pp
        self.ranks = [rank_of_stage(stage, setup.pp, setup.schedule) for stage in range(len(bounds) - 1)]

    def on_ranks(self, sums: Sequence[float]) -> list[float]:
        """Return what each rank's stages sum up to."""
        found = [0.0] * self.num_ranks
        for rank, (first, last) in zip(self.ranks, itertools.pairwise(self.bounds), strict=True):
            found[rank] += sums[last] - sums[first]
        return found

    def rank_of(self, layer: int) -> int:
        """Return the rank that runs a layer."""
        return self.ranks[bisect.bisect_right(self.bounds, layer) - 1]

    def repeated(self, shared: Sequence[tuple[Sequence[int], int]]) -> list[float]:
        """Return the elements that each rank's layers count more than once, from the layers that share parameters [count]."""
        found = [0.0] * self.num_ranks
        for layers, num_params in shared:
            holders = [self.rank_of(layer) for layer in layers]
            for rank in set(holders):
                found[rank] += (holders.count(rank) - 1) * num_params
        return found

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the largest value among each rank's layers."""
        found = [0.0] * self.num_ranks
        for rank, (first, last) in zip(self.ranks, itertools.pairwise(self.bounds), strict=True):
            found[rank] = max(found[rank], *values[first:last])
        return found
