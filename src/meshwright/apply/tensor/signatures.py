"""What a proof was made with, as values that can be compared: the structure of modules, and the signature of a call.

A proof (`proof.py`) holds for the code that it ran. Which code a module runs is decided by its classes, its attributes
(functions, numbers, flags, objects of configuration), the modes of the modules in it, and what it is called with: arguments that
are no tensors, nesting, dtypes, and sizes. Where one of these is new, the proof says nothing, and is made again (`guard.py`).

Not covered, and left to types and sentinels: numbers inside of tensors, global variables, closures' variables, files and time.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

_PLAIN = (str, int, float, bool, bytes, type(None), complex, torch.dtype, torch.device, torch.Size)
_DEPTH = 4
"""Objects inside of objects that are looked into [levels]."""
OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has of torch: dicts of parameters, buffers, children and hooks, and `training`."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Those of them whose entries run in a forward."""


# -- the structure of a module ------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Return 64 bits of a description's text, as hexadecimal digits; equal in all processes."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def describe_structure(module: nn.Module) -> tuple[Any, ...]:
    """Return what decides the code that a module and those inside it run: classes, modes, attributes, hooks."""
    seen: dict[int, int] = {}
    return tuple((name, *_describe_module(child, seen)) for name, child in module.named_modules())


def _describe_module(module: nn.Module, seen: dict[int, int]) -> tuple[Any, ...]:
    attributes = vars(module)
    own = tuple((name, describe_value(value, seen)) for name, value in attributes.items() if name not in OWN)
    hooks = tuple(_name_of(hook) for kind in HOOKS for hook in attributes[kind].values())
    return _class_of(module), module.training, own, hooks


def _class_of(module: nn.Module) -> str:
    # Classes of ours, made around the user's, have its name and module.
    return f"{type(module).__module__}.{type(module).__qualname__}"


def describe_value(value: Any, seen: dict[int, int] | None = None, depth: int = _DEPTH) -> Any:
    """Return what stands for an attribute: numbers and texts as they are, functions by name and code, tensors by shape."""
    seen = {} if seen is None else seen
    if isinstance(value, enum.Enum):
        return type(value).__qualname__, value.name
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype), tuple(value.shape)
    if isinstance(value, nn.Module):
        return "module", _class_of(value)
    if isinstance(value, type) or callable(value):
        return "callable", _name_of(value)
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if depth == 0:
        return "object", type(value).__qualname__
    return type(value).__qualname__, tuple((str(key), describe_value(v, seen, depth - 1)) for key, v in _items(value))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, (set, frozenset)):
        yield from enumerate(sorted(value, key=repr))
    else:
        yield from getattr(value, "__dict__", {}).items()


def _name_of(function: Any) -> Any:
    """Return what stands for a function: its name, its code, and what it carries along."""
    if isinstance(function, functools.partial):
        kept = (*function.args, *sorted(function.keywords.items()))
        return "partial", _name_of(function.func), tuple(repr(describe_value(value, depth=1)) for value in kept)
    if isinstance(function, types.MethodType):
        return "method", type(function.__self__).__qualname__, _name_of(function.__func__)
    if isinstance(function, types.FunctionType):
        code = function.__code__
        cells = tuple(_cell(cell) for cell in function.__closure__ or ())
        return function.__module__, function.__qualname__, hashlib.sha256(code.co_code).hexdigest()[:16], cells
    if isinstance(function, nn.Module):
        return _class_of(function)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return getattr(function, "__module__", ""), name


def _cell(cell: Any) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:  # not set yet
        return None
    return describe_value(value, depth=0) if isinstance(value, _PLAIN) else type(value).__qualname__


class Snapshot:
    """The attributes of a module and of those inside it at one moment, to be compared with what they are now.

    A comparison looks at the identity of each attribute, and of the entries of lists, dicts and objects that are attributes:
    about a microsecond a module. What it holds stays alive, so that another object cannot come to the same address.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._dicts: list[tuple[dict[str, Any], list[Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._hooks: list[dict[Any, Any]] = []
        seen: set[int] = set()
        for child in module.modules():
            attributes = vars(child)
            self._dicts.append((attributes, list(attributes.values())))
            self._hooks += [attributes[kind] for kind in HOOKS]
            for name, value in attributes.items():
                if name not in OWN:
                    self._watch(value, seen, _DEPTH)
        self._num_hooks = list(map(len, self._hooks))

    def _watch(self, value: Any, seen: set[int], depth: int) -> None:
        if depth == 0 or id(value) in seen or isinstance(value, (*_PLAIN, Tensor, nn.Module, type, enum.Enum)):
            return
        seen.add(id(value))
        if isinstance(value, (list, tuple)):
            self._lists.append((value, list(value)))
        elif isinstance(value, dict):
            self._dicts.append((value, list(value.values())))
        elif hasattr(value, "__dict__") and not isinstance(value, (types.FunctionType, types.MethodType)):
            self._dicts.append((vars(value), list(vars(value).values())))
        for _, item in _items(value):
            self._watch(item, seen, depth - 1)

    def is_current(self) -> bool:
        """Tell whether nothing has been assigned since."""
        same = operator.is_
        return (
            all(len(now) == len(then) and all(map(same, now.values(), then)) for now, then in self._dicts)
            and all(len(now) == len(then) and all(map(same, now, then)) for now, then in self._lists)
            and list(map(len, self._hooks)) == self._num_hooks
        )


# -- the signature of a call --------------------------------------------------------------------------------------


def signature(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, exact_sizes: bool, with_gradients: bool
) -> tuple[Any, ...]:
    """Return what decides the code that a call runs: nesting, dtypes, sizes, and every argument that is no tensor.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        exact_sizes: Whether sizes count as they are; else only which are 0 or 1, and which are equal.
        with_gradients: Whether it counts which tensors require a gradient. What was proven with gradients holds without them.
    """
    describe = _Describer(exact_sizes=exact_sizes, with_gradients=with_gradients).describe
    return tuple(map(describe, args)), tuple((name, describe(value)) for name, value in kwargs.items())


def proven_digests(structure: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, asks_sizes: bool) -> list[str]:
    """Return digests of what is proven with a call: itself, and the same without gradients, or with other sizes.

    Args:
        structure: Of the module.
        args: What it was called with.
        kwargs: The same.
        asks_sizes: Whether other sizes may run other code.
    """
    return [
        digest((structure, (asks_sizes, signature(args, kwargs, exact_sizes=asks_sizes, with_gradients=gradients))))
        for gradients in (True, False)
    ]


class _Describer:
    """Describes the arguments of one call."""

    def __init__(self, *, exact_sizes: bool, with_gradients: bool) -> None:
        self._exact_sizes = exact_sizes
        self._with_gradients = with_gradients
        self._places: dict[int, str] = {}  # sizes, in the order in which they are met

    def describe(self, value: Any, depth: int = _DEPTH) -> Any:
        if isinstance(value, Tensor):
            shape = tuple(value.shape) if self._exact_sizes else tuple(map(self._place_of, value.shape))
            return str(value.dtype), shape, self._with_gradients and value.requires_grad
        if isinstance(value, enum.Enum):
            return type(value).__qualname__, value.name
        if isinstance(value, _PLAIN):
            return type(value).__name__, value
        if isinstance(value, (nn.Module, type)) or callable(value) or depth == 0:
            return describe_value(value, depth=0)
        items = tuple((str(key), self.describe(item, depth - 1)) for key, item in _items(value))
        return type(value).__qualname__, items

    def _place_of(self, size: int) -> Any:
        return size if size < 2 else self._places.setdefault(size, f"s{len(self._places)}")
