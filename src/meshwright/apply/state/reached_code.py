"""Code that a step runs: what forwards, hooks and the loss look up, and the functions that they may call."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from meshwright.apply.state.outside import Outside

__all__: list[str] = []


def names_read(module: nn.Module, functions: Sequence[Any], outside: Outside) -> set[str]:
    """Return the names that forwards, hooks, the loss and their callees look up, in any namespace."""
    known: dict[str, list[types.CodeType]] = {}
    for function in outside.functions:
        known.setdefault(function.__name__, []).append(function.__code__)
    hooks = [
        hook
        for child in module.modules()
        for held in (child._forward_hooks, child._forward_pre_hooks)
        for hook in held.values()
    ]
    patched = [value for child in module.modules() for value in vars(child).values() if callable(value)]
    waiting = {"forward", "__call__", "__next__"}
    waiting |= {getattr(function, "__name__", "") for function in (*functions, *hooks, *patched)}
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for code in known.get(name, ()):
                waiting |= set(_names_in(code)) - found
    return found


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
