"""States of Python's and NumPy's global generators: kept, compared, sent to other ranks, restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import getstate, setstate
from typing import Any

import numpy as np
from numpy.random import get_state, set_state

__all__: list[str] = []

# By name: while a forward runs, others may stand in the modules (`apply/randomness/python_seeding.py`).


class PythonState:
    """The states of Python's and NumPy's global generators."""

    def __init__(self) -> None:
        self.python = getstate()
        self.numpy: Any = get_state()

    def restore(self) -> None:
        """Restore both."""
        setstate(self.python)
        set_state(self.numpy)

    def has_moved(self) -> bool:
        """Tell whether either has drawn since."""
        return not self.is_like(PythonState())

    def is_like(self, other: PythonState) -> bool:
        """Tell whether both have the same states there."""
        return self.python == other.python and self._is_like_of_numpy(other)

    def holds(self, *, of_numpy: bool) -> bool:
        """Tell whether NumPy's generator, else Python's, is in this state."""
        return self._is_like_of_numpy(PythonState()) if of_numpy else getstate() == self.python

    def _is_like_of_numpy(self, other: PythonState) -> bool:
        return self.numpy[2:] == other.numpy[2:] and np.array_equal(self.numpy[1], other.numpy[1])

    @property
    def places(self) -> tuple[int, int]:
        """Positions of both in their blocks of numbers."""
        return self.python[1][-1], self.numpy[2]

    def to_json(self) -> list[Any]:
        """Return both as JSON values, equal where the states are."""
        version, words, gauss = self.python
        kind, keys, *rest = self.numpy
        return [[version, list(words), gauss], [kind, keys.tolist(), *rest]]

    @classmethod
    def from_json(cls, value: list[Any]) -> PythonState:
        """Return what `to_json` gave."""
        state = cls()
        (version, words, gauss), (kind, keys, *rest) = value
        state.python = (version, tuple(words), gauss)
        state.numpy = (kind, np.array(keys, dtype="uint32"), *rest)
        return state


@contextlib.contextmanager
def kept_python_state() -> Iterator[None]:
    """Restore both after the context: what it runs must not change what the program draws next."""
    state = PythonState()
    try:
        yield
    finally:
        state.restore()
