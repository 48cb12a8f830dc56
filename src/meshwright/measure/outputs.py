"""Search for the first module of a forward whose output differs; gradients do not show it, since backward reaches them all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from meshwright.measure.oracle import ModuleOutputs

__all__: list[str] = []

LOOSER = 100.0
"""By how much the bound of a tensor's largest entry is loosened for the sum of its squares [ratio].

Where each of N entries may be off by the bound times the largest, the sum of their squares may be off by 2 sqrt(N) times the
bound, times the largest entry over their root mean square; and adding up N squares in another order rounds by itself.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankOutputs:
    """Module outputs on one rank."""

    tp_rank: int
    """Where the rank stands among those that share each layer."""
    modules: Mapping[str, ModuleOutputs]
    """Name of a module -> its numbers, of this rank's share."""


def first_difference(
    ranks: Sequence[RankOutputs], expected: Mapping[str, ModuleOutputs], bound: float
) -> tuple[str, float] | None:
    """Return the first module, in the order in which they end in one process, whose output differs there, and by how much.

    Over ranks with shares of the batch the numbers add up. If each share has the same tensor (a table of positions), they are too
    large by the number of forwards. Ranks that share a layer have copies or slices. A module agrees where one of these readings
    fits each of its tensors. A wrong output that fits by chance, or whose entries are only reordered, is not found. Modules that
    did not run on both sides are left out.

    Args:
        ranks: The records of each rank.
        expected: The records of one process.
        bound: Largest relative difference of a tensor that counts as equal.

    Returns:
        (name, relative difference of the sum of squares), or None.

    >>> half, whole = ModuleOutputs(1, [2.0], [2.0]), ModuleOutputs(1, [4.0], [4.0])
    >>> ranks = [RankOutputs(tp_rank=0, modules={"a": half, "b": half}) for _ in range(2)]
    >>> first_difference(ranks, {"a": whole, "b": ModuleOutputs(1, [5.0], [5.0])}, 1e-11)
    ('b', 0.2)
    """
    for name, wanted in expected.items():
        if any(name in rank.modules for rank in ranks):
            difference = _difference(name, ranks, wanted)
            if not difference <= LOOSER * bound:
                return name, difference
    return None


def _difference(name: str, ranks: Sequence[RankOutputs], wanted: ModuleOutputs) -> float:
    by_tp: dict[int, list[ModuleOutputs]] = {}
    for rank in ranks:
        own = by_tp.setdefault(rank.tp_rank, [])
        if name in rank.modules:
            own.append(rank.modules[name])
    present = [numbers for members in by_tp.values() for numbers in members]
    if any(len(numbers.squares) != len(wanted.squares) for numbers in present):
        return math.inf
    num_forwards = [
        sum(numbers.num_forwards for numbers in members) / wanted.num_forwards for members in by_tp.values()
    ]
    worst = 0.0
    for index, square in enumerate(wanted.squares):
        pairs = [
            (sum(n.squares[index] for n in members), sum(n.signed_squares[index] for n in members))
            for members in by_tp.values()
        ]
        alike = [(a / max(n, 1), b / max(n, 1)) for (a, b), n in zip(pairs, num_forwards, strict=True)]
        target = (square, wanted.signed_squares[index])
        readings = itertools.chain.from_iterable(([_sum(each)], each) for each in (pairs, alike))
        worst = max(worst, min(max(_apart(pair, target) for pair in reading) for reading in readings))
    return worst


def _sum(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in pairs), sum(b for _, b in pairs)


def _apart(pair: tuple[float, float], target: tuple[float, float]) -> float:
    """Return the larger difference of the two numbers, relative to the squares expected, which bound both."""
    gaps = [abs(a - b) for a, b in zip(pair, target, strict=True) if a != b and not (math.isnan(a) and math.isnan(b))]
    if not gaps:
        return 0.0
    largest = max(math.inf if math.isnan(gap) else gap for gap in gaps)
    return largest / target[0] if 0.0 < target[0] < math.inf else math.inf
