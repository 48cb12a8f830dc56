"""Tensors without values that a description would leave in the user's modules and classes: tables kept in a global variable.

Code of models fills a table in its first forward, and finds it in later ones. A description's forward would leave one without
values there, and the user's next forward in this process would compute with it.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import types
from collections.abc import Iterator, Set
from typing import Any, Final

from meshwright._torch_private import FakeTensor
from meshwright.describe.function_caches import WITHOUT

__all__: list[str] = []

_DEPTH: Final = 4
"""Containers inside of each other that are looked through [count]."""
_MOST_ENTRIES: Final = 10_000
"""Of a container that is looked through; a larger one is data [count]."""
_INSTALLED: Final = ("site-packages", "dist-packages")


@contextlib.contextmanager
def no_tensors_left(*code: Any) -> Iterator[None]:
    """Put back, after the context, what holds tensors without values then: variables, class attributes, entries of containers.

    Args:
        code: Functions, classes or modules whose packages are searched though they are installed; scripts always are.
    """
    packages = {(getattr(item, "__module__", None) or "").partition(".")[0] for item in code} - {""}
    before = {id(space): (space, dict(vars(space))) for space in _spaces(packages)}
    try:
        yield
    finally:
        for space in _spaces(packages):
            _clean(space, before.get(id(space), (space, {}))[1])


def _spaces(packages: Set[str]) -> Iterator[Any]:
    """Yield the modules of the user's, and the classes that they define."""
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if not isinstance(module, types.ModuleType) or (top in WITHOUT and name != "__main__"):
            continue
        file = getattr(module, "__file__", None) or ""
        if top not in packages and any(part in file for part in _INSTALLED):
            continue
        yield module
        yield from [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == name]


def _clean(space: Any, before: dict[str, Any]) -> None:
    for name, value in list(vars(space).items()):
        if isinstance(value, types.FunctionType):
            _purge(value.__dict__, _DEPTH)
        elif value is before.get(name):
            _purge(value, _DEPTH)
        elif _has_fake(value, _DEPTH):
            if name in before and not _has_fake(before[name], _DEPTH):
                setattr(space, name, before[name])
            else:
                delattr(space, name)


def _purge(container: Any, depth: int) -> None:
    """Take entries that hold tensors without values out of a container that was there before."""
    if isinstance(container, dict):
        for key in [key for key, item in _entries(container) if _has_fake(item, depth)]:
            del container[key]
    elif isinstance(container, (list, collections.deque)):
        kept = [item for _, item in _entries(container) if not _has_fake(item, depth)]
        if len(kept) < len(container) <= _MOST_ENTRIES:
            container.clear()
            container.extend(kept)
    elif isinstance(container, set):
        container -= {item for _, item in _entries(container) if _has_fake(item, depth)}


def _has_fake(value: Any, depth: int) -> bool:
    if isinstance(value, FakeTensor):
        return True
    return depth > 0 and any(_has_fake(item, depth - 1) for _, item in _entries(value))


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)) or len(value) > _MOST_ENTRIES:
        return []
    return list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
