"""Objects, containers and functions that attributes of modules refer to: their contents, and those that belong to no module.

A script may hold references to these too: a schedule whose number it changes between steps, a recorder, a configuration.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from meshwright.apply.state.generators import is_generator, read_generator

__all__: list[str] = []

_ATOMS = (int, float, bool, str, bytes, complex, type(None))
_CLOSED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)  # a deep copy shares these, too
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_MAX_ENTRIES = 10_000
"""Of a container that is looked into; a larger one is data, not state [count]."""
_MAX_VALUES = 64
"""Of a tensor whose values are compared, beside its version: `.data` is written to without one [count]."""
_MAX_BYTES = 2**16
"""Of another array whose values are compared [bytes]."""


def parts_of(value: Any) -> list[Any]:
    """Return the contents of a container, a bound method, a partial or an object; nothing for modules and tensors."""
    if isinstance(value, (*_ATOMS, *_CLOSED, Tensor, nn.Module)):
        return []
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    own = list(_own_values(value))
    if isinstance(value, (dict, *_SEQUENCES)) and len(value) <= _MAX_ENTRIES:
        own += [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return own


def _own_values(value: Any) -> Iterator[Any]:
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.values())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)


def _key(value: Any) -> Any:
    """Return a key that stays equal unless something other than the value's parts has changed."""
    if isinstance(value, _ATOMS):
        return type(value), value
    if isinstance(value, Tensor):
        small = value.numel() <= _MAX_VALUES and value.is_leaf and value.device.type == "cpu"
        return id(value), value._version, tuple(value.detach().reshape(-1).tolist()) if small else None
    if is_generator(value):
        return id(value), read_generator(value)
    if isinstance(getattr(value, "nbytes", None), int) and value.nbytes <= _MAX_BYTES and hasattr(value, "tobytes"):
        return id(value), value.tobytes()
    return id(value)


def rows_of(value: Any) -> list[Any]:
    """Return a key that stays equal while a value, and everything it reaches, is unchanged."""
    rows: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        rows.append(_key(item))
        if id(item) not in seen:
            seen.add(id(item))
            parts = [] if is_generator(item) else parts_of(item)
            rows.append(len(parts))
            waiting += parts
    return rows


def independent(values: Iterable[Any], own: Collection[int]) -> dict[int, Any]:
    """Return, by id, the objects reached by the values that do not themselves reach a module or a tensor of these ids.

    They include other modules, such as one that a list hides from its owner.
    """
    found: dict[int, Any] = {}
    holders: dict[int, list[int]] = {}
    tied: list[int] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in found or isinstance(value, (*_ATOMS, *_CLOSED)):
            continue
        found[id(value)] = value
        if id(value) in own:
            tied.append(id(value))
            continue
        inside = list(value.modules()) if isinstance(value, nn.Module) else parts_of(value)
        if isinstance(value, nn.Module):
            inside += [*value.parameters(recurse=False), *value.buffers(recurse=False)]
        for part in inside:
            holders.setdefault(id(part), []).append(id(value))
            if part is not value:
                waiting.append(part)
    while tied:
        key = tied.pop()
        if found.pop(key, None) is not None:
            tied += holders.get(key, ())
    return found


def tensors_reached(value: Any) -> list[Tensor]:
    """Return the tensors that a value reaches."""
    return [item for item in independent([value], ()).values() if isinstance(item, Tensor)]
