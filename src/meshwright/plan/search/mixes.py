"""Mixes of strategies whose memory is known, and whose time is worked out where it can matter; and the fastest of those."""

from __future__ import annotations

import dataclasses
import heapq

from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_cost import PassesCost
from meshwright.plan.costs.step_costs import StepCosts
from meshwright.plan.search.candidate import Candidate, key_of, num_strategies
from meshwright.plan.search.space import Choice, Degrees

__all__: list[str] = []


@dataclasses.dataclass(slots=True)
class Mix:
    """A mix with its memory."""

    degrees: Degrees
    order: tuple[str, int, str]
    """Schedule, virtual stages and recompute."""
    sharding: tuple[int, int | None, str]
    """ZeRO, its shard and what is offloaded."""
    passes: PassesCost
    setup: Setup
    """What data parallelism sees of it: the degrees and the sharding."""
    peak: float
    """The memory of a device at the peak of a step [bytes]."""

    @property
    def choice(self) -> Choice:
        """What is chosen beside the degrees."""
        (schedule, virtual, recompute), (zero, shard, offload) = self.order, self.sharding
        return Choice(zero, shard, schedule, virtual, recompute, offload)

    def least_s(self, costs: StepCosts) -> float:
        """Return a time that a step does not go below [s]."""
        return costs.least_s(self.passes, self.setup)

    def candidate(self, costs: StepCosts) -> Candidate:
        """Return the mix with its cost."""
        return Candidate(self.degrees, self.choice, costs.cost_with(self.passes, self.setup))


class Fastest:
    """The fastest candidates by now.

    Args:
        most: Candidates to keep at most [count].
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_taken = 0
        self._kept: list[tuple[float, int, int, Candidate]] = []  # the slowest first: times and counts are negative

    def may_take(self, mix: Mix, costs: StepCosts) -> bool:
        """Tell whether a mix may be among the fastest; False only where `take` would leave it out for certain."""
        if len(self._kept) < self._most:
            return True
        slow, _ = key_of(mix.least_s(costs), num_strategies(mix.degrees, mix.choice))
        return slow <= -self._kept[0][0]

    def take(self, candidate: Candidate) -> None:
        """Keep a candidate where it is among the fastest; of equal ones those that came first."""
        slow, many = candidate.key()
        self._num_taken += 1
        heapq.heappush(self._kept, (-slow, -many, -self._num_taken, candidate))
        if len(self._kept) > self._most:
            heapq.heappop(self._kept)

    def ranked(self) -> list[Candidate]:
        """Return the candidates, the fastest first."""
        return [candidate for *_, candidate in sorted(self._kept, key=lambda entry: (-entry[0], -entry[1], -entry[2]))]
