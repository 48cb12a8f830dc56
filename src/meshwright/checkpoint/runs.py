"""Runs of a part of a tensor: entries that are neighbours in the full tensor and in the part.

Two parts of one tensor, what a file holds and what a rank wants, share the entries that their runs share. So any layout is read
from any other, and no more than that is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.layout import ShardLayout

__all__: list[str] = []


class EntryRun(NamedTuple):
    """Entries that follow one another."""

    full: int
    """Place of the first in the flattened full tensor."""
    local: int
    """Its place in the flattened part."""
    length: int
    """How many [count]."""


def runs_of(layout: ShardLayout) -> list[EntryRun]:
    """Return the runs of a part, by their place in the full tensor.

    >>> runs_of(ShardLayout(shape=(2, 4), dim=1, ranges=((1, 3),)))
    [EntryRun(full=1, local=0, length=2), EntryRun(full=5, local=2, length=2)]
    """
    if not layout.numel:
        return []  # whatever its other sizes are
    if layout.dim is None:
        return _clipped([EntryRun(0, 0, layout.full_numel)], layout.flat)
    outer, inner = math.prod(layout.shape[: layout.dim]), math.prod(layout.shape[layout.dim + 1 :])
    sizes = [stop - start for start, stop in layout.ranges]
    before = [0, *itertools.accumulate(sizes)]
    rows = np.arange(outer, dtype=np.int64)
    columns = [
        (
            rows * layout.shape[layout.dim] * inner + start * inner,
            rows * before[-1] * inner + place * inner,
            size * inner,
        )
        for (start, _), place, size in zip(layout.ranges, before, sizes, strict=False)
        if size * inner
    ]
    runs = [
        EntryRun(full, local, length)
        for fulls, locals_, length in columns
        for full, local in zip(fulls.tolist(), locals_.tolist(), strict=True)
    ]
    return _clipped(_joined(sorted(runs)), layout.flat)


def _joined(runs: Sequence[EntryRun]) -> list[EntryRun]:
    joined: list[EntryRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and last.full + last.length == run.full and last.local + last.length == run.local:
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return joined


def _clipped(runs: Sequence[EntryRun], flat: tuple[int, int] | None) -> list[EntryRun]:
    if flat is None:
        return [run for run in runs if run.length]
    first, last = flat
    found = []
    for run in runs:
        start, stop = max(run.local, first), min(run.local + run.length, last)
        if start < stop:
            found.append(EntryRun(run.full + start - run.local, start - first, stop - start))
    return found


class CommonRun(NamedTuple):
    """Entries that two parts have in common, and that are neighbours in both."""

    left: int
    """Place of the first in the one part."""
    right: int
    """Its place in the other."""
    length: int
    """How many [count]."""


def common_runs(left: Sequence[EntryRun], right: Sequence[EntryRun]) -> Iterator[CommonRun]:
    """Yield the entries that two parts have in common, in the order of the full tensor.

    Args:
        left: `runs_of` one part.
        right: `runs_of` the other.
    """
    i = j = 0
    while i < len(left) and j < len(right):
        mine, other = left[i], right[j]
        start, stop = max(mine.full, other.full), min(mine.full + mine.length, other.full + other.length)
        if start < stop:
            yield CommonRun(mine.local + start - mine.full, other.local + start - other.full, stop - start)
        if mine.full + mine.length <= other.full + other.length:
            i += 1
        else:
            j += 1


def close_together(runs: Iterable[CommonRun], most_gap: int, most_span: int) -> Iterator[list[CommonRun]]:
    """Yield groups of runs that follow one another in the left part.

    Args:
        runs: The runs.
        most_gap: Entries that may lie between two of one group [count].
        most_span: Entries from a group's first to its last, unless it is a single run [count].
    """
    group: list[CommonRun] = []
    for run in runs:
        if group:
            gap = run.left - group[-1].left - group[-1].length
            if not 0 <= gap <= most_gap or run.left + run.length - group[0].left > most_span:
                yield group
                group = []
        group.append(run)
    if group:
        yield group
