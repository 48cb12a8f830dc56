"""Functions of Python's and NumPy's global generators, which begin a stream of their own at each call while a forward runs."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.sites import in_forward, running_draws
from meshwright.python_state import PythonState

__all__: list[str] = []

_STATES = ("seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator")
_MASK = 2**32 - 1
_OWNERS: tuple[tuple[Any, object], ...] = ((random, random.random.__self__), (np.random, np.random.rand.__self__))
"""(module, the generator behind its functions), from before any of them is replaced."""


@contextlib.contextmanager
def python_draws(seed: int, forward: ForwardDraws | None = None) -> Iterator[None]:
    """Start Python's and NumPy's generators from a seed inside the context, and restore them.

    Args:
        seed: The same where code that draws has to decide alike: 64 bits.
        forward: What runs; its calls have their places where it knows them.
    """
    before = PythonState()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with contextlib.nullcontext() if forward is None else in_forward(forward):
            if forward is None or forward.python is None:
                yield
            else:
                with calls_seeded():
                    yield
                forward.python.check()
    finally:
        before.restore()


def seeds_from_here() -> tuple[list[int], int] | None:
    """Return the seeds of the forward that runs, and how many of them were taken; None where calls have none."""
    drawn = running_draws()
    calls = None if drawn is None else drawn[1].python
    return None if calls is None else (calls.made, len(calls.made))


@contextlib.contextmanager
def seeds_again(seeds: tuple[list[int], int] | None) -> Iterator[None]:
    """Take the seeds again, inside the context, that a forward took after `seeds_from_here`."""
    if seeds is None:
        yield
        return
    made, start = seeds
    before, _again.seeds, state = _again.seeds, iter(made[start:]), PythonState()
    try:
        with calls_seeded():
            yield
    finally:
        _again.seeds = before
        state.restore()


class _Again(threading.local):
    """The seeds that a forward takes again in this thread."""

    seeds: Iterator[int] | None = None


_again = _Again()


def _functions() -> Iterator[tuple[Any, str, Any]]:
    """Yield (module, name, function) of what draws from the global generators."""
    for module, owner in _OWNERS:
        for name, value in list(vars(module).items()):
            if getattr(value, "__self__", None) is owner and name not in _STATES:
                yield module, name, value


@contextlib.contextmanager
def calls_seeded() -> Iterator[None]:
    """Seed each call of the global generators by its place, of forwards in this thread that have `PythonCalls`."""
    before = list(_functions())
    for module, name, function in before:
        setattr(module, name, _seeded(function, _seed_python if module is random else _seed_numpy))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _seeded(function: Callable[..., Any], seed: Callable[[int], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        key = _next_key()
        if key is not None:
            seed(key)
        return function(*args, **kwargs)

    return draw


def _next_key() -> int | None:
    if _again.seeds is not None:
        return next(_again.seeds, None)
    drawn = running_draws()
    calls = None if drawn is None else drawn[1].python
    return None if calls is None else calls.next_key()


def _seed_python(key: int) -> None:
    random.seed(key)


def _seed_numpy(key: int) -> None:
    np.random.seed([key & _MASK, key >> 32])
