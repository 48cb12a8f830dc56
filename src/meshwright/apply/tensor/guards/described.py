"""Descriptions of attributes and arguments: equal, in every process, where the code that uses them would do the same.

Numbers and texts describe themselves. A function is described by its name, code, defaults and closure, an object by its class and
attributes, a tensor by dtype and shape. Any other value is described by its pickle, else by its class alone: *opaque*.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import pickle
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

PLAIN = (str, int, float, bool, bytes, type(None), complex, torch.dtype, torch.device, torch.Size, torch.layout)
DEPTH = 5
"""Objects inside of objects that are looked into [levels]."""
OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has of torch: dicts of parameters, buffers, children and hooks, and `training`."""


def digest(value: Any) -> str:
    """Return 64 bits of a description's text, as hexadecimal digits; equal in all processes."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def class_name(value: Any) -> str:
    """Return the name of an object's class; a class of ours around a user's has the user's name."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object whose class keeps them in slots."""
    names = [name for kind in type(value).__mro__ for name in _names_of_slots(kind)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _names_of_slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (
        (slots,) if isinstance(slots, str) else tuple(name for name in slots if name not in ("__dict__", "__weakref__"))
    )


def items_of(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Yield (key, value) of the contents of a container or object; None where none are known."""
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, (list, tuple, collections.deque)):
        return iter(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return iter(enumerate(sorted(value, key=repr)))
    if isinstance(value, (range, slice)):
        return iter((("start", value.start), ("stop", value.stop), ("step", value.step)))
    attributes = {**slots_of(value), **getattr(value, "__dict__", {})}
    return (
        iter(attributes.items()) if attributes or (type(value).__module__ != "builtins" and _is_bare(value)) else None
    )


def _is_bare(value: Any) -> bool:
    """Tell whether an object of a class in Python has no attributes at all."""
    return hasattr(value, "__dict__") and not vars(value)


class Describer:
    """Describes the values of one module or call."""

    def __init__(self) -> None:
        self.is_opaque = False
        """Whether something was met that only its class stands for."""
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []

    def describe(self, value: Any, depth: int = DEPTH) -> Any:
        """Return the description of a value."""
        if isinstance(value, enum.Enum):
            return type(value).__qualname__, value.name
        if isinstance(value, PLAIN):
            return type(value).__name__, value
        if isinstance(value, Tensor):
            return "tensor", str(value.dtype), tuple(value.shape)
        if isinstance(value, type):
            return "class", value.__module__, value.__qualname__
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)  # an id identifies an object only while the object lives
        if depth == 0:
            return "deep", class_name(value)
        if isinstance(value, nn.Module):
            plain = [item for item in vars(value).items() if item[0] not in OWN and isinstance(item[1], PLAIN)]
            return "module", class_name(value), value.training, self._inside(plain, depth)
        return self._function(value, depth) or self._object(value, depth)

    def _inside(self, items: Any, depth: int) -> tuple[Any, ...]:
        return tuple((str(key), self.describe(item, depth - 1)) for key, item in items)

    def _object(self, value: Any, depth: int) -> Any:
        items = items_of(value)
        if items is not None:
            return class_name(value), self._inside(items, depth)
        try:
            return class_name(value), hashlib.sha256(pickle.dumps(value)).hexdigest()[:16]
        except Exception:  # noqa: BLE001 - whatever an object's own pickling raises
            self.is_opaque = True
            return "opaque", class_name(value)

    def _function(self, value: Any, depth: int) -> Any:
        if isinstance(value, functools.partial):
            return "partial", self._inside(enumerate((value.func, value.args, value.keywords)), depth)
        if isinstance(value, types.MethodType):
            return "method", self._inside(enumerate((value.__self__, value.__func__)), depth)
        if isinstance(value, types.FunctionType):
            held = (value.__defaults__, value.__kwdefaults__, [contents_of(cell) for cell in value.__closure__ or ()])
            return value.__module__, value.__qualname__, _code(value.__code__), self._inside(enumerate(held), depth)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            return "builtin", getattr(value, "__module__", ""), value.__qualname__
        return None


def contents_of(cell: types.CellType) -> Any:
    """Return the content of a closure's cell; None where it is not set."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _code(code: types.CodeType) -> str:
    found = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        is_set = isinstance(constant, frozenset)  # sets: their order differs between processes
        text = repr(sorted(constant, key=repr) if is_set else constant)
        found.update((_code(constant) if isinstance(constant, types.CodeType) else text).encode())
    found.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return found.hexdigest()[:16]


def class_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module's user classes: numbers, functions, objects; the innermost of one name."""
    found: dict[str, Any] = {}
    for kind in reversed(user_classes(module)):
        found |= {name: value for name, value in vars(kind).items() if not name.startswith("__")}
    return found


def user_classes(module: nn.Module) -> list[type]:
    """Return the classes of a module that are not torch's, in the order of their resolution."""
    return [kind for kind in type(module).__mro__ if kind is not object and not kind.__module__.startswith("torch.")]
