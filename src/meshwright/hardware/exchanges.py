"""Times of exchanges between ranks of one host, as a probe measured them: by kind, number of ranks and bytes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Final

__all__: list[str] = []

EXCHANGES: Final = ("all_reduce", "all_gather", "reduce_scatter", "message")
"""Kinds. The bytes of a collective are those of the whole tensor; a message goes from one rank to another."""

Rows = Sequence[Sequence[float]]
"""(ranks, bytes, seconds), ascending."""


def problems_of(kind: str, rows: Rows) -> list[str]:
    """Return what is wrong with the rows of one kind; each text has the rule."""
    if kind not in EXCHANGES:
        return [f"exchanges['{kind}'] (rule: one of {', '.join(EXCHANGES)})"]
    if any(len(row) != 3 or not all(number > 0 and math.isfinite(number) for number in row) for row in rows):
        return [
            f"exchanges['{kind}']={[list(row) for row in rows]} (rule: rows of ranks, bytes and seconds, all positive)"
        ]
    places = [(row[0], row[1]) for row in rows]
    if not all(one < other for one, other in itertools.pairwise(places)):
        return [f"exchanges['{kind}']: ranks and bytes {places} (rule: they ascend)"]
    return []


def exchange_s(rows: Rows, num_bytes: float, ranks: int) -> float:
    """Return what the rows say [s].

    Between two sizes the time is straight over the bytes, as latency and bandwidth are; between two numbers of ranks it is
    straight over their logarithm. Beyond the largest size the bandwidth of the last two holds; outside the measured numbers of
    ranks, the nearest.

    Args:
        rows: At least one, of one kind.
        num_bytes: The whole tensor, or the message [bytes].
        ranks: That take part [count].
    """
    groups = sorted({row[0] for row in rows})
    above = min(bisect.bisect_left(groups, ranks), len(groups) - 1)
    below = above if ranks >= groups[above] else max(0, above - 1)
    few, many = (_at_size([(row[1], row[2]) for row in rows if row[0] == groups[i]], num_bytes) for i in (below, above))
    if below == above:
        return few
    return few + (many - few) * math.log(ranks / groups[below]) / math.log(groups[above] / groups[below])


def _at_size(points: Sequence[tuple[float, float]], num_bytes: float) -> float:
    above = bisect.bisect_left(points, num_bytes, key=lambda point: point[0])
    if above == 0:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * num_bytes / points[0][0]
    above = min(above, len(points) - 1)
    (small, quick), (large, slow) = points[above - 1], points[above]
    # A slope is never below a tenth of what the larger one's bytes took, however noisy the two are.
    slope = (
        max((slow - quick) / (large - small), 0.1 * slow / large)
        if num_bytes > large
        else (slow - quick) / (large - small)
    )
    return slow + slope * (num_bytes - large)
