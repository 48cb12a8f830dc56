"""Integers that stand for sizes of this rank's shard: they know the full size and notice comparisons by code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__: list[str] = []


def _computing(function: Callable[[int, int], Any], *, turned: bool = False) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._computed(other, function, turned=turned)


def _asking(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self._asked(other, function)


class Size(int):
    """A size on this rank.

    Args:
        local: The size on this rank.
        full: The whole tensor's.
        told: Called at each comparison with a plain number of which one device gets another result.
    """

    full: int
    told: Callable[[], None]

    def __new__(cls, local: int, full: int, told: Callable[[], None]) -> Size:
        made = int.__new__(cls, local)
        made.full = full
        made.told = told
        return made

    __hash__ = int.__hash__

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def _computed(self, other: Any, function: Callable[[int, int], Any], *, turned: bool = False) -> Any:
        if type(other) not in (int, Size):
            pair = (other, int(self)) if turned else (int(self), other)
            return function(*pair)
        theirs = (int(other), other.full if isinstance(other, Size) else other)
        mine = (int(self), self.full)
        first, second = (theirs, mine) if turned else (mine, theirs)
        local = function(first[0], second[0])
        if type(local) is not int:
            return local
        try:
            full = function(first[1], second[1])
        except ArithmeticError:
            return local
        return Size(local, full, self.told)

    def _asked(self, other: Any, function: Callable[[Any, Any], bool]) -> bool:
        if isinstance(other, Size):  # the proof has run with both, and both follow from the layout
            return function(int(self), int(other))
        local = function(int(self), other)
        if isinstance(other, (int, float)) and function(self.full, other) != local:
            self.told()
        return local

    __add__ = _computing(operator.add)
    __radd__ = _computing(operator.add, turned=True)
    __sub__ = _computing(operator.sub)
    __rsub__ = _computing(operator.sub, turned=True)
    __mul__ = _computing(operator.mul)
    __rmul__ = _computing(operator.mul, turned=True)
    __floordiv__ = _computing(operator.floordiv)
    __rfloordiv__ = _computing(operator.floordiv, turned=True)
    __mod__ = _computing(operator.mod)
    __eq__ = _asking(operator.eq)
    __ne__ = _asking(operator.ne)
    __lt__ = _asking(operator.lt)
    __le__ = _asking(operator.le)
    __gt__ = _asking(operator.gt)
    __ge__ = _asking(operator.ge)

    def __neg__(self) -> Any:
        return Size(-int(self), -self.full, self.told)

    def __bool__(self) -> bool:
        return self._asked(0, operator.ne)
