"""Integers that stand for sizes of tensors, and report where code uses their value for anything but another tensor's size.

A torch function may take such a size, and integer arithmetic returns another one. Every other use needs the value: a comparison,
`float()`, `range()`, a list index, a dict key, a division, a format, any function written in C.

A subclass of int cannot report that, since C code reads its value without a call. So this is a subclass of torch.SymInt, which
torch functions take, and which claims to be an int in Python's `isinstance`.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from meshwright.apply.tensor.types.typed_run import is_torchs_own

__all__: list[str] = []

Told = Callable[[frozenset[int]], None]

_SHAPE_LIBRARIES = (f"{os.sep}einops{os.sep}",)
"""Packages that do with sizes what torch does: views and contractions for every size, from a table that is keyed by shapes."""


class _Node:
    """The methods that torch calls on a torch.SymInt's node, where no TorchFunctionMode has replaced it by an int."""

    def __init__(self, value: int) -> None:
        self._value = value

    def maybe_as_int(self) -> int:
        return self._value

    def guard_int(self, *_: Any) -> int:
        return self._value

    def is_int(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda: False
        raise AttributeError(name)


class AskedSize(torch.SymInt):
    """A size of a tensor.

    Args:
        value: The size.
        origins: The argument sizes from which it derives.
        told: Called with them where code uses the value.
        is_own: Whether it is an argument's size itself, not a number computed from one.
    """

    __class__: Any = property(lambda _: int)  # for isinstance(); type() tells the truth

    def __init__(self, value: int, origins: frozenset[int], told: Told, *, is_own: bool = False) -> None:
        torch.SymInt.__init__(self, _Node(value))
        self._value = value
        self._origins = origins
        self._told = told
        self._is_own = is_own

    def _taken(self) -> int:
        self._tell(self._origins)
        return self._value

    def _tell(self, origins: frozenset[int]) -> None:
        if not _is_general(sys._getframe(1)):
            self._told(origins)

    def _computed(self, other: Any, function: Callable[[Any, Any], Any], *, turned: bool = False) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        is_size = type(other) is AskedSize
        if not is_size and type(other) not in (int, bool):
            return function(other, self._taken()) if turned else function(self._taken(), other)
        theirs = other._value if is_size else other
        result = function(theirs, self._value) if turned else function(self._value, theirs)
        origins = self._origins | other._origins if is_size else self._origins
        if type(result) is not int:
            self._tell(origins)
            return result
        return AskedSize(result, origins, self._told)

    def _compared(self, other: Any, function: Callable[[Any, Any], bool]) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        is_size = type(other) is AskedSize
        result = function(self._value, other._value if is_size else other)
        if not self._is_decided(other, function):
            self._tell(self._origins | other._origins if is_size else self._origins)
        return result

    def _is_decided(self, other: Any, function: Callable[[Any, Any], bool]) -> bool:
        """Tell whether all sizes with the same signature compare like this: from 2 on, and equal where these are equal."""
        if not self._is_own or self._value < 2:
            return False
        is_equality = function in (operator.eq, operator.ne)
        if type(other) is AskedSize:
            return is_equality and other._is_own and other._value >= 2
        if type(other) is not int:
            return False
        return other < 2 or (other == 2 and function in (operator.ge, operator.lt))

    def __deepcopy__(self, memo: Any) -> int:
        return self._taken()

    def __reduce__(self) -> Any:
        return int, (self._taken(),)

    def __bool__(self) -> bool:
        return bool(self._compared(0, operator.ne))

    def __format__(self, spec: str) -> str:
        return format(self._taken(), spec)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._taken(), name)  # bit_length() and the like


_OPERATIONS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "pow": operator.pow,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "divmod": divmod,
}
_VALUES = {"hash": hash, "index": int, "int": int, "float": float, "str": str, "repr": repr, "abs": abs}
_ALONE: dict[str, Any] = {
    "neg": lambda self: self._computed(-1, operator.mul),
    "invert": lambda self: -self._computed(1, operator.add),
    **dict.fromkeys(("round", "trunc", "floor", "ceil", "pos"), lambda self, *_: self),
}


def _give_operators() -> None:
    found = {**_ALONE, **{name: _value(function) for name, function in _VALUES.items()}}
    for name, function in _OPERATIONS.items():
        found |= {name: _operator(function, turned=False), f"r{name}": _operator(function, turned=True)}
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        found[name] = _comparison(getattr(operator, name))
    for name, value in found.items():
        setattr(AskedSize, f"__{name}__", value)


def _value(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: function(self._taken())


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._compared(other, function)


def _operator(function: Callable[[Any, Any], Any], *, turned: bool) -> Callable[[Any, Any], Any]:
    def compute(self: Any, other: Any, *rest: Any) -> Any:
        if rest:  # pow() with a modulus
            return pow(self._taken(), other, *rest)
        return self._computed(other, function, turned=turned)

    return compute


_give_operators()


def _is_general(frame: FrameType | None) -> bool:
    """Tell whether the code that uses a value works for every size: torch's own, and that of libraries for shapes."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return is_torchs_own(frame) or any(library in file for library in _SHAPE_LIBRARIES)


def plain_sizes(tree: Any) -> Any:
    """Return a torch function's arguments with plain ints for sizes."""
    kind = type(tree)
    if kind is AskedSize:
        return tree._value
    if kind is torch.Size:
        return torch.Size([plain_sizes(item) for item in tree])
    if kind in (list, tuple):
        return kind(plain_sizes(item) for item in tree)
    if kind is dict:
        return {key: plain_sizes(item) for key, item in tree.items()}
    if kind is slice:
        return slice(plain_sizes(tree.start), plain_sizes(tree.stop), plain_sizes(tree.step))
    return tree


def origins_in(tree: Any) -> frozenset[int]:
    """Return the origins of the sizes among a torch function's arguments."""
    kind = type(tree)
    if kind is AskedSize:
        return tree._origins
    if kind in (list, tuple, torch.Size):
        return frozenset().union(*map(origins_in, tree))
    if kind is dict:
        return frozenset().union(*map(origins_in, tree.values()))
    if kind is slice:
        return origins_in((tree.start, tree.stop, tree.step))
    return frozenset()
