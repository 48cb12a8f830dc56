"""Stages of a setup placed on ranks."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Sequence

from meshwright.plan.costs.stages import rank_of_stage

__all__: list[str] = []


class StagesOnRanks:
    """Stages of a pipeline, and the ranks that run them.

    Args:
        bounds: Where stages begin and the last one ends.
        num_ranks: Ranks of the pipeline [count].
        schedule: Its name, or "sequential".
        kinds: The kind of each layer.
    """

    def __init__(self, bounds: tuple[int, ...], num_ranks: int, schedule: str, *, kinds: Sequence[int]) -> None:
        self.bounds = bounds
        self.num_ranks = num_ranks
        self.ranks = [rank_of_stage(stage, num_ranks, schedule) for stage in range(len(bounds) - 1)]
        self._at_bounds = operator.itemgetter(*bounds)
        self._kinds = kinds

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

    def on_rank(self, rank: int, sums: Sequence[float]) -> float:
        """Return what one rank's stages sum up to, as `on_ranks` does."""
        if len(self.ranks) == self.num_ranks:
            return sums[self.bounds[rank + 1]] - sums[self.bounds[rank]]
        found = 0.0
        for stage, own in enumerate(self.ranks):
            if own == rank:
                found += sums[self.bounds[stage + 1]] - sums[self.bounds[stage]]
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

    def most(self, of_kinds: Sequence[float]) -> list[float]:
        """Return the largest value among each rank's layers, from those of the kinds; none is negative."""
        values = {kinds: max((of_kinds[kind] for kind in kinds), default=0.0) for kinds in set(self._kinds_on_ranks)}
        return [values[kinds] for kinds in self._kinds_on_ranks]

    @functools.cached_property
    def _kinds_on_ranks(self) -> list[frozenset[int]]:
        found: list[set[int]] = [set() for _ in range(self.num_ranks)]
        for rank, (first, last) in zip(self.ranks, itertools.pairwise(self.bounds), strict=True):
            found[rank].update(self._kinds[first:last])
        return list(map(frozenset, found))
