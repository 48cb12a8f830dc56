"""Integers that stand for sizes of this rank's shard: they know the full size and notice comparisons by code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__: list[str] = []


class Size(int):
    """A size on this rank.

    Args:
        local: The size on this rank.
        full: The whole tensor's.
        compared: Called at each comparison with (whether one device gets the same result, whether the other is a plain number).
    """

    full: int
    compared: Callable[[bool, bool], None]

    def __new__(cls, local: int, full: int, compared: Callable[[bool, bool], None]) -> Size:
        made = int.__new__(cls, local)
        made.full = full
        made.compared = compared
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
        return Size(local, full, self.compared)

    def _asked(self, other: Any, function: Callable[[Any, Any], bool]) -> bool:
        local = function(int(self), int(other) if isinstance(other, Size) else other)
        if isinstance(other, (int, float)):
            full = function(self.full, other.full if isinstance(other, Size) else other)
            self.compared(local == full, not isinstance(other, Size))
        return local

    def __add__(self, other: Any) -> Any:
        return self._computed(other, operator.add)

    def __radd__(self, other: Any) -> Any:
        return self._computed(other, operator.add, turned=True)

    def __sub__(self, other: Any) -> Any:
        return self._computed(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._computed(other, operator.sub, turned=True)

    def __mul__(self, other: Any) -> Any:
        return self._computed(other, operator.mul)

    def __rmul__(self, other: Any) -> Any:
        return self._computed(other, operator.mul, turned=True)

    def __floordiv__(self, other: Any) -> Any:
        return self._computed(other, operator.floordiv)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._computed(other, operator.floordiv, turned=True)

    def __mod__(self, other: Any) -> Any:
        return self._computed(other, operator.mod)

    def __neg__(self) -> Any:
        return Size(-int(self), -self.full, self.compared)

    def __eq__(self, other: Any) -> bool:
        return self._asked(other, operator.eq)

    def __ne__(self, other: Any) -> bool:
        return self._asked(other, operator.ne)

    def __lt__(self, other: Any) -> bool:
        return self._asked(other, operator.lt)

    def __le__(self, other: Any) -> bool:
        return self._asked(other, operator.le)

    def __gt__(self, other: Any) -> bool:
        return self._asked(other, operator.gt)

    def __ge__(self, other: Any) -> bool:
        return self._asked(other, operator.ge)

    def __bool__(self) -> bool:
        return self._asked(0, operator.ne)
