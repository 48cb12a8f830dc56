"""Random generators made by user code with Python, NumPy or torch: their states, read and set."""

from __future__ import annotations

import functools
import pickle
import random
import sys
import types
from typing import Any

import torch

__all__: list[str] = []


class GeneratorState:
    """A generator's state, comparable by its position."""

    __slots__ = ("_bytes", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._bytes = pickle.dumps(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratorState) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)


def is_generator(value: Any) -> bool:
    """Tell whether a value is a random generator with a readable state."""
    return _is_of_generators(type(value))


@functools.lru_cache(maxsize=10_000)
def _is_of_generators(kind: type) -> bool:
    if issubclass(kind, (torch.Generator, random.Random)):
        return not issubclass(kind, random.SystemRandom)
    return kind.__module__.startswith("numpy.random") and (hasattr(kind, "bit_generator") or hasattr(kind, "get_state"))


def read_generator(value: Any) -> GeneratorState:
    """Return a generator's state."""
    if isinstance(value, random.Random):
        return GeneratorState(value.getstate())
    if hasattr(value, "bit_generator"):
        return GeneratorState(value.bit_generator.state)
    return GeneratorState(value.get_state())


def write_generator(value: Any, state: GeneratorState) -> None:
    """Set a generator's state."""
    if isinstance(value, random.Random):
        value.setstate(state.value)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state.value
    else:
        value.set_state(state.value)


def draws_globally(value: Any) -> bool:
    """Tell whether a value is a function of Python's or NumPy's that draws from the global generator."""
    # What stands for a package that is not installed raises where it is asked for an attribute (MONAI): its type comes first.
    if not isinstance(value, (types.MethodType, types.BuiltinMethodType)) or value.__self__ is None:
        return False
    owner = value.__self__
    numpy = sys.modules.get("numpy")
    # These are methods of one hidden object each.
    hidden = getattr(random, "_inst", None), None if numpy is None else getattr(numpy.random, "mtrand", numpy)
    return owner is hidden[0] or (hidden[1] is not None and owner is getattr(hidden[1], "_rand", numpy))
