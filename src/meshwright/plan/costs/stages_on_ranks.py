"""Stages of a setup placed on ranks."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Sequence

from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.stages import rank_of_stage

__all__: list[str] = []


class StagesOnRanks:
    """Stages of a setup, and the ranks that run them."""

    def __init__(self, bounds: Sequence[int], setup: Setup) -> None:
        self.bounds = bounds
        self.num_ranks = setup.pp
        self.ranks = _ranks_of(len(bounds) - 1, setup.pp, setup.schedule)
        self._at_bounds = operator.itemgetter(*bounds)

    def on_ranks(self, sums: Sequence[float]) -> list[float]:
        """Return what each rank's stages sum up to."""
        at_bounds = self._at_bounds(sums)
        of_stages = list(map(operator.sub, at_bounds[1:], at_bounds))
        if len(of_stages) == self.num_ranks:  # one each, in turn
            return of_stages
        found = [0.0] * self.num_ranks
        for rank, own in zip(self.ranks, of_stages, strict=True):
            found[rank] += own
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


@functools.lru_cache(maxsize=1 << 10)
def _ranks_of(num_stages: int, num_ranks: int, schedule: str) -> tuple[int, ...]:
    return tuple(rank_of_stage(stage, num_ranks, schedule) for stage in range(num_stages))
