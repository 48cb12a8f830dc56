"""Single numbers near the ends of their range, in trials: so that code which compares one with a probability goes either way.

A layer that is left out in one forward of twenty is left out in few trials of random numbers. With all single numbers near 0 in
one trial and near 1 in another, either branch of each such comparison is tried.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__: list[str] = []

_NEAR = 2.0**-10
"""The part of its range, at one end, in which a number is then [fraction]."""
_MOST = 128
"""Numbers of a forward that are moved: a loop may draw, and run layers, until one is on the other side [count]."""


class _Edge(threading.local):
    """The end to which numbers move in this thread."""

    end: int | None = None
    left = 0


_edge = _Edge()


@contextlib.contextmanager
def near_end(end: int | None) -> Iterator[None]:
    """Move single numbers near an end of their range inside the context.

    Args:
        end: 0 or 1; None leaves them as they are.
    """
    before = _edge.end, _edge.left
    _edge.end, _edge.left = end, _MOST
    try:
        yield
    finally:
        _edge.end, _edge.left = before


def is_moving() -> bool:
    """Tell whether single numbers move in this thread."""
    return _edge.end is not None


def moved(number: float, low: float, high: float) -> float:
    """Return what a number between `low` and `high` is in this context."""
    end = take_end()
    if end is None:
        return number
    return low + (number - low) * _NEAR if end == 0 else high - (high - number) * _NEAR


def take_end() -> int | None:
    """Return the end to which a number moves that is drawn now, 0 or 1; None where it stays."""
    if _edge.end is None or not _edge.left:
        return None
    _edge.left -= 1
    return _edge.end
