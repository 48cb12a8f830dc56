"""Functions of Python's and NumPy's global generators, which begin a stream of their own at each call while a forward runs."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from meshwright._torch_dispatch import is_fake_mode_on
from meshwright._torch_private import is_in_backward
from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.single_numbers import is_moving, moved
from meshwright.apply.randomness.sites import in_forward, repeated, running_draws, running_forward, take_mark
from meshwright.python_state import PythonState

__all__: list[str] = []

_READS = ("getstate", "get_state", "get_bit_generator")
_WRITES = ("seed", "setstate", "set_state", "set_bit_generator")
_UNIFORM = ("random", "uniform", "rand", "random_sample")
_MASK = 2**32 - 1
_OWNERS: tuple[tuple[Any, Any], ...] = ((random, random.random.__self__), (np.random, np.random.rand.__self__))
"""(module, the generator behind its functions), from before any of them is replaced."""
_PYTHON, _NUMPY = (owner for _, owner in _OWNERS)


@contextlib.contextmanager
def python_draws(seed: int, forward: ForwardDraws | None = None) -> Iterator[None]:
    """Start Python's and NumPy's generators from a seed inside the context, and restore them.

    Args:
        seed: The same where code that draws has to decide alike: 64 bits.
        forward: What runs; its calls have their places where it knows them.
    """
    before = PythonState()
    _PYTHON.seed(seed)
    _NUMPY.seed(seed % 2**32)
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


def seeds_from_here() -> tuple[list[int | None], int] | None:
    """Return the seeds of the forward that runs, and how many of them were taken; None where calls have none."""
    drawn = running_draws()
    calls = None if drawn is None else drawn[1].python
    return None if calls is None else (calls.made, len(calls.made))


@contextlib.contextmanager
def seeds_again(seeds: tuple[list[int | None], int] | None) -> Iterator[None]:
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

    seeds: Iterator[int | None] | None = None


_again = _Again()


def _functions() -> Iterator[tuple[Any, Any, str, Any]]:
    """Yield (module, generator, name, function) of what draws from the global generators, or sets their states."""
    for module, owner in _OWNERS:
        for name, value in list(vars(module).items()):
            is_seed = name == "seed" and not hasattr(value, "__wrapped__")  # NumPy's is no method of its generator
            if is_seed or (getattr(value, "__self__", None) is owner and name not in _READS):
                yield module, owner, name, value


@contextlib.contextmanager
def calls_seeded() -> Iterator[None]:
    """Seed, or count, each call of the global generators by its place, of forwards in this thread that have `PythonCalls`."""
    before = list(_functions())
    for module, owner, name, function in before:
        setattr(module, name, _setting(function, owner) if name in _WRITES else _drawing(function, owner))
    try:
        yield
    finally:
        for module, _, name, function in before:
            setattr(module, name, function)


@contextlib.contextmanager
def with_calls_seeded(running: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Run a step whose backward may repeat such calls, as a checkpoint in the model's own code does."""
    with running, calls_seeded():
        yield


def _drawing(function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        key = _next_key(owner)
        if key is not None:
            # A generator of `random` takes any number; NumPy's takes words of 32 bits.
            owner.seed([key & _MASK, key >> 32] if owner is _NUMPY else key)
        result = function(*args, **kwargs)
        if is_moving() and isinstance(result, float) and function.__name__ in _UNIFORM:
            result = moved(result, *_range_of(function.__name__, *args, **kwargs))
        return result

    return draw


def _range_of(name: str, low: Any = 0.0, high: Any = 1.0, **kwargs: Any) -> tuple[float, float]:
    """Return the range of a call of a function whose numbers are uniform, of `random` or of NumPy."""
    if name != "uniform":
        return 0.0, 1.0
    return float(kwargs.get("a", low)), float(kwargs.get("b", high))


def _setting(function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def set_state(*args: Any, **kwargs: Any) -> Any:
        forward = running_forward()
        calls = None if forward is None else forward.python
        if calls is None:
            return function(*args, **kwargs)
        before = calls.seeded_by_code.setdefault(owner, PythonState())
        result = function(*args, **kwargs)
        if before.holds(of_numpy=owner is _NUMPY):  # what code had kept before it seeded
            calls.seeded_by_code.pop(owner, None)
        return result

    return set_state


def _next_key(owner: Any) -> int | None:
    """Return the seed of a call that the code makes now; None where its numbers are the generator's next ones."""
    if _again.seeds is not None:
        return next(_again.seeds, None)
    if is_in_backward():
        found = repeated(lambda step, mark: step.seeds.get(mark))
        return None if found is None else found[1]
    forward = running_forward()
    calls = None if forward is None else forward.python
    if calls is None:
        return None
    if owner in calls.seeded_by_code:
        calls.count()
        return None
    key, drawn = calls.next_key(), running_draws()
    if key is not None and drawn is not None and not is_fake_mode_on():
        drawn[0].seeds[take_mark()] = key
    return key
