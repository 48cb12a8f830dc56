"""What two calls, or two modules, have in common where nothing but numbers in tensors differs.

A call's signature says which calls a proof covers. A module's structure says which modules are likely to be cut alike; it is a
filter that costs nothing, and the proof decides.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__: list[str] = []

_PLAIN: Final = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)
_MAX_DEPTH: Final = 6
TORCHS_OWN: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has: what it holds is found by other ways."""
PLACES: Final = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"})
"""Attributes that say where a module stands, which as a rule decides nothing."""


def signature_of(tree: Any, depth: int = 0) -> Any:
    """Return a value that can be a key: dtypes, shapes and nesting of tensors, and everything plain beside them."""
    if isinstance(tree, Tensor):
        return ("tensor", tree.dtype, tuple(tree.shape), tree.requires_grad)
    if isinstance(tree, (*_PLAIN, enum.Enum)):
        return (type(tree).__qualname__, repr(tree) if isinstance(tree, float) else tree)
    if isinstance(tree, (list, tuple)) and depth < _MAX_DEPTH:
        return (type(tree).__qualname__, *(signature_of(item, depth + 1) for item in tree))
    if isinstance(tree, Mapping) and depth < _MAX_DEPTH:
        items = ((repr(key), signature_of(value, depth + 1)) for key, value in tree.items())
        return (type(tree).__qualname__, *sorted(items, key=lambda item: item[0]))
    if isinstance(tree, nn.Module):
        return ("module", id(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and depth < _MAX_DEPTH:
        fields = (
            (field.name, signature_of(getattr(tree, field.name), depth + 1)) for field in dataclasses.fields(tree)
        )
        return (type(tree).__qualname__, *fields)
    return _name_of(tree)


def structure_of(module: nn.Module) -> list[Any]:
    """Return classes, shapes of parameters and settings of a module and all inside it, without where it stands among others."""
    rows: list[Any] = []
    known: dict[int, str] = {}
    for name, child in module.named_modules():
        settings = {
            key: _told(value, known)
            for key, value in vars(child).items()
            if key not in TORCHS_OWN and key not in PLACES and not isinstance(value, (Tensor, nn.Module))
        }
        shapes = {key: list(value.shape) for key, value in child._parameters.items() if value is not None}
        hooks = [len(found) for found in (child._forward_hooks, child._forward_pre_hooks)]
        rows.append([name, f"{type(child).__module__}.{type(child).__qualname__}", settings, shapes, hooks])
    return rows


def places_of(module: nn.Module) -> list[Any]:
    """Return where a module and all inside it say that they stand."""
    return [[key, repr(value)] for child in module.modules() for key, value in vars(child).items() if key in PLACES]


def _told(value: Any, known: dict[int, str], depth: int = 0) -> str:
    if isinstance(value, (*_PLAIN, enum.Enum)):
        return f"{type(value).__qualname__} {value!r}"
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if id(value) in known:
        return known[id(value)]
    if depth >= _MAX_DEPTH:
        return type(value).__qualname__
    known[id(value)] = type(value).__qualname__  # for what holds itself
    inside = ", ".join(f"{key}={_told(item, known, depth + 1)}" for key, item in sorted(_items(value)))
    known[id(value)] = f"{_name_of(value)}({inside})"
    return known[id(value)]


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        yield from ((f"{index:06d}", item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((repr(key), item) for key, item in value.items())
    elif isinstance(value, (set, frozenset)):
        yield from ((str(index), item) for index, item in enumerate(sorted(value, key=repr)))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif not isinstance(value, (nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        yield from ((key, item) for key, item in getattr(value, "__dict__", {}).items() if key not in PLACES)


def _name_of(value: Any) -> str:
    """Return the qualified name of a function or class, else of an object's class; of a lambda also where it stands."""
    own = value if hasattr(value, "__qualname__") else type(value)
    code = getattr(value, "__code__", None)
    place = f":{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(own, '__module__', '')}.{own.__qualname__}{place}"
