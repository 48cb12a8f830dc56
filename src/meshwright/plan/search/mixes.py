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

Sharding = tuple[int, int | None, str]
"""ZeRO, its shard and what is offloaded."""


@dataclasses.dataclass(slots=True)
class Split:
    """Degrees with every sharding that they can have."""

    degrees: Degrees
    shardings: list[Sharding]
    setups: list[Setup]
    """What data parallelism sees of each."""
    without: dict[tuple[str, int], list[float]] = dataclasses.field(default_factory=dict)
    """Schedule and virtual stages -> the peak of each sharding where nothing runs again [bytes]."""


@dataclasses.dataclass(slots=True)
class Group:
    """Mixes that differ in their sharding alone, before they are costed."""

    place: int
    """Where its first mix is among all mixes: of equal ones the first counts [count]."""
    split: Split
    schedule: str
    virtual: int
    recompute: str
    least_s: float
    """A time that none of their steps goes below [s]."""

    @property
    def least_key(self) -> float:
        """What none of them comes before, where candidates are sorted."""
        fewest = Choice(0, None, self.schedule, self.virtual, self.recompute, "none")
        return key_of(self.least_s, num_strategies(self.split.degrees, fewest))[0]


@dataclasses.dataclass(slots=True)
class Mix:
    """A mix with its memory."""

    group: Group
    index: int
    """Of its sharding."""
    passes: PassesCost
    peak: float
    """The memory of a device at the peak of a step [bytes]."""

    @property
    def place(self) -> int:
        """Where it is among all mixes [count]."""
        return self.group.place + self.index

    @property
    def setup(self) -> Setup:
        """What data parallelism sees of it: the degrees and the sharding."""
        return self.group.split.setups[self.index]

    @property
    def choice(self) -> Choice:
        """What is chosen beside the degrees."""
        group, (zero, shard, offload) = self.group, self.group.split.shardings[self.index]
        return Choice(zero, shard, group.schedule, group.virtual, group.recompute, offload)

    def least_s(self, costs: StepCosts) -> float:
        """Return a time that a step does not go below [s]."""
        return costs.least_s(self.passes, self.setup)

    def candidate(self, costs: StepCosts) -> Candidate:
        """Return the mix with its cost."""
        return Candidate(self.group.split.degrees, self.choice, costs.cost_with(self.passes, self.setup))


class Fastest:
    """The fastest candidates by now.

    Args:
        most: Candidates to keep at most [count].
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[tuple[float, int, int, Candidate]] = []  # the slowest first: all numbers are negative

    def may_take_any(self, group: Group) -> bool:
        """Tell whether a mix of a group may be among the fastest; False only where none can."""
        return len(self._kept) < self._most or group.least_key <= -self._kept[0][0]

    def may_take(self, mix: Mix, costs: StepCosts) -> bool:
        """Tell whether a mix may be among the fastest; False only where `take` would leave it out for certain."""
        if len(self._kept) < self._most:
            return True
        slow, _ = key_of(mix.least_s(costs), num_strategies(mix.group.split.degrees, mix.choice))
        return slow <= -self._kept[0][0]

    def take(self, candidate: Candidate, place: int) -> None:
        """Keep a candidate where it is among the fastest; of equal ones those that are first among all mixes."""
        slow, many = candidate.key()
        heapq.heappush(self._kept, (-slow, -many, -place, candidate))
        if len(self._kept) > self._most:
            heapq.heappop(self._kept)

    def ranked(self) -> list[Candidate]:
        """Return the candidates, the fastest first."""
        return [candidate for *_, candidate in sorted(self._kept, key=lambda entry: (-entry[0], -entry[1], -entry[2]))]
