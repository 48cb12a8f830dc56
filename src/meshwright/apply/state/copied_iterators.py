"""Iterators that stand in variables, and copies of them that go on from the same place: none can be rewound."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from typing import Any

__all__: list[str] = []

COPIED_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
"""Iterators that may stand in a variable, and of which a copy goes on from the same place."""

# Python 3.12 warns that it will not copy those of itertools, and 3.14 does not: there they are refused as any other iterator.
if sys.version_info < (3, 14):
    COPIED_ITERATORS += (itertools.count, itertools.cycle)


def copied(iterator: Any) -> Any:
    """Return a copy of one of COPIED_ITERATORS, at the same position."""
    if type(iterator).__module__ != "itertools":
        return copy.copy(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if not isinstance(iterator, itertools.cycle):
            return copy.copy(iterator)
        # copy.copy would share the iterator that the first round reads, so that the original would skip what a copy takes.
        inside, saved, rest = _parts_of(iterator)
        made: Any = itertools.cycle(copied(inside) if isinstance(inside, COPIED_ITERATORS) else inside)
        made.__setstate__((list(saved), rest))
        return made


def can_be_copied(iterator: Any) -> bool:
    """Tell whether a copy of one of COPIED_ITERATORS is independent: not one of a cycle that reads from a generator."""
    if not isinstance(iterator, itertools.cycle):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        inside = _parts_of(iterator)[0]
    return isinstance(inside, COPIED_ITERATORS) and can_be_copied(inside)


def position_of(iterator: Any) -> Any:
    """Return where one of COPIED_ITERATORS stands, comparable."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    if not isinstance(iterator, itertools.cycle):
        return iterator.__length_hint__()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        inside, saved, rest = _parts_of(iterator)
    return len(saved), rest, position_of(inside) if isinstance(inside, COPIED_ITERATORS) else None


def _parts_of(iterator: Any) -> tuple[Any, list[Any], int]:
    """Return what a cycle reads, what it has kept of that, and whether it reads what it has kept."""
    _, (inside,), (saved, rest) = iterator.__reduce__()
    return inside, saved, rest
