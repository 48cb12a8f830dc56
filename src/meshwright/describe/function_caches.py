"""Caches of functions (`functools.lru_cache`, `functools.cache`): a trial leaves no tensor in them.

Model code caches tables of positions by their sizes, for the whole process. A trial runs the same code on tensors without values,
or in another dtype. What it leaves in such a cache, a training step would take for its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

from torch import Tensor, nn

from meshwright._torch_private import without_cached_weights

__all__: list[str] = []

_CACHE: Final[Any] = type(functools.lru_cache(lambda: None))
WITHOUT: Final = sys.stdlib_module_names | {"torch", "numpy", "scipy", "sympy", "mpmath", "meshwright"}
"""Packages that cache no tensors of a model. A search through them would take longer than through all others."""
_DEPTH: Final = 6
"""Decorators around one function that are looked through [count]."""


@contextlib.contextmanager
def no_cached_tensors(*modules: nn.Module) -> Iterator[None]:
    """Clear, after the context, each cache that was filled inside of it and holds a tensor then.

    Weights that `torch.nn.utils.parametrize.cached` keeps around the context are not used inside of it.

    Args:
        modules: Modules that run; caches of imported code are found without them.
    """
    before = {id(cache): cache.cache_info().misses for cache in _reached(modules)}
    try:
        with without_cached_weights():
            yield
    finally:
        for cache in _reached(modules):
            if cache.cache_info().misses != before.get(id(cache), 0) and _holds_tensor(cache):
                cache.cache_clear()


def _holds_tensor(cache: Any) -> bool:
    # The garbage collector is told of a cache's results one by one, or of the dict that holds them where it has no bound.
    held = gc.get_referents(cache)
    return any(_has_tensor(item, _DEPTH) for item in held if not isinstance(item, (type, types.FunctionType)))


def _has_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if not depth:
        return False
    if isinstance(value, dict):
        return any(_has_tensor(item, depth - 1) for item in itertools.chain(value.keys(), value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_has_tensor(item, depth - 1) for item in value)
    if isinstance(value, (nn.Module, types.FunctionType, type)):
        return False
    return any(_has_tensor(item, depth - 1) for item in getattr(value, "__dict__", {}).values())


# ---- where caches are found


class _Imported:
    """Caches of the modules that are imported, searched again once there are more of these."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._last: tuple[int, str | None] = 0, None
        self._found: dict[int, weakref.ref[Any]] = {}

    def caches(self) -> list[Any]:
        last = len(sys.modules), next(reversed(sys.modules), None)  # a new one comes last
        if last != self._last:
            self._last = last
            for name in sys.modules.keys() - self._names:
                self._names.add(name)
                self._search(name)
        return [cache for known in self._found.values() if (cache := known()) is not None]

    def _search(self, name: str) -> None:
        module = sys.modules.get(name)
        if name.partition(".")[0] in WITHOUT - {"__main__"} or not isinstance(module, types.ModuleType):
            return
        own = list(vars(module).values())
        own += [item for kind in own if isinstance(kind, type) for item in _of_class(kind, name)]
        self._found.update({id(cache): weakref.ref(cache) for cache in _among(own)})


_imported = _Imported()


def _reached(modules: Iterable[nn.Module]) -> list[Any]:
    children = [child for module in modules for child in module.modules()]
    values = [value for child in children for value in vars(child).values() if callable(value)]
    for kind in {kind for child in children for kind in type(child).__mro__}:
        if kind.__module__.partition(".")[0] not in WITHOUT:
            values += _of_class(kind, kind.__module__)
    return list({id(cache): cache for cache in [*_imported.caches(), *_among(values)]}.values())


def _of_class(kind: type, module: str) -> list[Any]:
    """Return what a class holds by itself, if it was made in this module."""
    return list(vars(kind).values()) if kind.__module__ == module else []


def _among(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the caches among functions, and below their decorators."""
    seen: set[int] = set()
    waiting = [(value, _DEPTH) for value in values]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or not depth:
            continue
        seen.add(id(value))
        if type(value) is _CACHE:
            yield value
        waiting += [(item, depth - 1) for item in _parts(value)]


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return [value.__func__]
    if isinstance(value, functools.partial):
        return [value.func]
    if isinstance(value, property):
        return [value.fget]
    if type(value) is _CACHE:
        return [value.__wrapped__]
    if not isinstance(value, types.FunctionType):
        return []
    found = [vars(value).get("__wrapped__")]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found
