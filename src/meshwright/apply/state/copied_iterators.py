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
        return copy.copy(iterator)
