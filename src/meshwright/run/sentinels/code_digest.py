"""Digests of code: functions, what they call in their own package, and classes, equal on two ranks where the code is.

Hosts may have other versions of a user's files. Names, shapes and plans agree then, and the ranks compute different things.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__: list[str] = []

_DEPTH = 8
"""Functions that call one another, followed within one package [count]."""
_Text = Callable[[Any], "str | None"]


def digest_function(function: types.FunctionType, text_of: _Text) -> str:
    """Return a digest of a function: its code, defaults, plain values in its closure, and what it calls in its package.

    Args:
        function: The function.
        text_of: Returns a value as text; None for a value without such a text.
    """
    return _hash(_parts(function, text_of, {function}, 0))


def digest_class(kind: type, text_of: _Text) -> str:
    """Return a digest of a module's class: all functions of it and of its bases below `nn.Module`.

    What they find in closures is left out: a class that a function of each rank makes may refer to that rank's own values.

    Args:
        kind: The class.
        text_of: As of `digest_function`.
    """
    parts: list[str] = []
    for base in kind.__mro__:
        if base in (nn.Module, object):
            break
        for name, entry in sorted(vars(base).items()):
            for function in _functions_of(entry):
                parts += [base.__qualname__, name, *_parts(function, text_of, {function}, 0, with_closure=False)]
    return _hash(parts)


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _functions_of(entry: Any) -> Iterator[types.FunctionType]:
    if isinstance(entry, types.FunctionType):
        yield _written(entry)
    elif isinstance(entry, (staticmethod, classmethod)):
        yield from _functions_of(entry.__func__)
    elif isinstance(entry, property):
        yield from _functions_of(entry.fget)


def _written(function: types.FunctionType) -> types.FunctionType:
    """Return what a decorator wraps that writes its own code in each process, with addresses in it (beartype)."""
    wrapped = vars(function).get("__wrapped__")
    is_generated = function.__code__.co_filename.startswith("<")
    return wrapped if is_generated and isinstance(wrapped, types.FunctionType) else function


def _parts(
    function: types.FunctionType,
    text_of: _Text,
    seen: set[types.FunctionType],
    depth: int,
    *,
    with_closure: bool = True,
) -> list[str]:
    cells = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells.append((name, text_of(cell.cell_contents) if with_closure else None))
        except ValueError:  # not assigned yet
            cells.append((name, None))
    parts = [*_code(function.__code__), str(text_of(function.__defaults__)), repr(cells)]
    parts.append(str(text_of(function.__kwdefaults__)))
    package = _package(function)
    for name in sorted(_names(function.__code__)):
        used = function.__globals__.get(name)
        if isinstance(used, float):  # a whole number may be a rank's own
            parts.append(f"{name} = {used!r}")
        if not isinstance(used, types.FunctionType) or _package(used) != package or package == "torch":
            continue
        used = _written(used)
        if used not in seen and depth < _DEPTH:
            seen.add(used)
            parts += [name, *_parts(used, text_of, seen, depth + 1, with_closure=with_closure)]
    return parts


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        yield from _constant(constant)


def _constant(constant: Any) -> Iterator[str]:
    if isinstance(constant, types.CodeType):
        yield from _code(constant)
    elif isinstance(constant, frozenset):  # in an order that a process draws
        yield repr(sorted(map(repr, constant)))
    elif isinstance(constant, tuple):
        for entry in constant:
            yield from _constant(entry)
    else:
        yield repr(constant)
