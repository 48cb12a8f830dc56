"""Conditions of a proof as values that can be compared: the structure of modules and the signature of a call.

A proof (`proof.py`) holds for the code that it ran. That code is decided by the module's classes, its attributes (functions,
numbers, flags, configuration objects), the modes of its modules, and its arguments: those that are not tensors, nesting, dtypes
and sizes. Where one of these is new, the part is proven again (`part_guard.py`).

Values in tensors count where the code reads one of an argument or a buffer (`asked.py`). Values of activations, global variables,
files and time are not covered here; types and sentinels watch those.

The search needs less: it distinguishes the calls of one forward, and finds modules that are likely to be cut alike. That is a
cheap filter, and the proof decides.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import operator
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import GLOBAL_MODULE_HOOKS, WrapperTensor
from meshwright.apply.state.arrays import is_array, read_array
from meshwright.apply.state.copied_iterators import COPIED_ITERATORS, position_of
from meshwright.apply.state.hook_tables import is_ours
from meshwright.apply.tensor.guards.ambient import Ambient, with_gradients
from meshwright.apply.tensor.guards.described import (
    DEPTH,
    OWN,
    PLAIN,
    Describer,
    class_attributes,
    class_name,
    contents_of,
    digest,
    items_of,
    slots_of,
    user_classes,
)

__all__: list[str] = []

Kind = tuple[tuple[str, ...], int]
"""Of a call: the names of the sizes on whose values its code depends, and whose numbers it depends on (`Asked.values`)."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module whose entries run in a forward, or in its backward."""
PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"})
"""Attributes that say where a module stands, which as a rule decides nothing."""


# -- the structure of a module ------------------------------------------------------------------------------------


def describe_structure(module: nn.Module) -> tuple[Any, ...]:
    """Return what decides the code of a module and its submodules: classes, modes, attributes, hooks."""
    describer = Describer()
    of_all = tuple(tuple(map(describer.describe, hooks.values())) for hooks in GLOBAL_MODULE_HOOKS)
    return of_all, *((name, *_describe_module(child, describer)) for name, child in module.named_modules())


def _describe_module(module: nn.Module, describer: Describer) -> tuple[Any, ...]:
    attributes = vars(module)
    own = tuple((name, describer.describe(v)) for name, v in attributes.items() if name not in OWN and not _is_child(v))
    of_class = tuple((name, describer.describe(value)) for name, value in class_attributes(module).items())
    theirs = [hook for kind in HOOKS for hook in attributes[kind].values() if not is_ours(hook)]
    hooks = tuple(map(describer.describe, theirs))
    return class_name(module), module.training, own, of_class, hooks


def _is_child(value: Any) -> bool:
    return isinstance(value, nn.Module)


def describe_likeness(module: nn.Module) -> tuple[Any, ...]:
    """Return what modules that are cut alike have in common: parameter shapes, but neither modes nor position in the model."""
    describer = _Likeness()
    rows: list[Any] = []
    for name, child in module.named_modules():
        plain = {key: v for key, v in vars(child).items() if key not in OWN and not isinstance(v, (Tensor, nn.Module))}
        own = tuple((key, describer.describe(value)) for key, value in plain.items() if key not in PLACES)
        shapes = tuple((key, tuple(value.shape)) for key, value in child._parameters.items() if value is not None)
        rows.append((name, class_name(child), own, shapes, tuple(len(vars(child)[kind]) for kind in HOOKS)))
    return tuple(rows)


def places_of(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the attributes in which a module and its submodules record their own position."""
    return tuple(
        (key, repr(value)) for child in module.modules() for key, value in vars(child).items() if key in PLACES
    )


class _Coarse(Describer):
    """Describes functions by name and line, and objects by their attributes alone."""

    def _function(self, value: Any, depth: int) -> Any:
        name = getattr(value, "__qualname__", None)
        if name is None:
            return super()._function(value, depth)  # a partial is opened
        code = getattr(value, "__code__", None)
        return "function", getattr(value, "__module__", ""), name, None if code is None else code.co_firstlineno

    def _object(self, value: Any, depth: int) -> Any:
        return class_name(value), self._inside(items_of(value) or (), depth)


class _Likeness(_Coarse):
    """Describes attributes without those that record a module's position."""

    def _inside(self, items: Any, depth: int) -> tuple[Any, ...]:
        return super()._inside(((key, item) for key, item in items if str(key) not in PLACES), depth)


class StructureSnapshot:
    """The attributes of a module and its submodules at one moment, for comparison with the present ones.

    A comparison checks the identity of each attribute, and of the entries of lists, dicts and objects among them; it takes about
    a microsecond a module. The snapshot keeps these objects alive, so that no other object gets the same address.
    """

    def __init__(self, module: nn.Module) -> None:
        self._dicts: list[tuple[Any, list[Any]]] = []  # dicts, and the dicts of classes
        self._empty: list[dict[Any, Any]] = []  # most hooks: known at once
        self._lists: list[tuple[Any, list[Any]]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._slots: list[tuple[Any, list[Any]]] = []
        self._states: list[tuple[Any, Any]] = []  # of arrays, and of iterators that go on
        self._seen: set[int] = {id(child) for child in module.modules()}
        for hooks in GLOBAL_MODULE_HOOKS:
            self._keep(hooks)
            for hook in hooks.values():
                self._watch(hook, DEPTH)
        for child in module.modules():
            attributes = vars(child)
            self._keep(attributes)
            for kind in HOOKS:
                self._keep(attributes[kind])
                for hook in attributes[kind].values():
                    self._watch(hook, DEPTH)
            for kind in user_classes(child):
                if id(kind) not in self._seen:
                    self._seen.add(id(kind))
                    self._keep(vars(kind))
            for name, value in attributes.items():
                if name not in OWN:
                    self._watch(value, DEPTH)

    def _keep(self, entries: Any) -> None:
        if type(entries) in (dict, collections.OrderedDict) and not entries:
            self._empty.append(entries)
        else:
            self._dicts.append((entries, list(entries.values())))

    def _watch(self, value: Any, depth: int) -> None:
        if depth == 0 or id(value) in self._seen or isinstance(value, (*PLAIN, Tensor, type)):
            return
        self._seen.add(id(value))
        if is_array(value) or isinstance(value, COPIED_ITERATORS):
            self._states.append((value, _state_of(value)))
            return
        if isinstance(value, types.MethodType):
            inside = [value.__self__, value.__func__]
        elif isinstance(value, types.FunctionType):
            self._cells += [(cell, contents_of(cell)) for cell in value.__closure__ or ()]
            inside = [*(contents_of(cell) for cell in value.__closure__ or ()), *(value.__defaults__ or ())]
        elif isinstance(value, nn.Module):
            self._keep(vars(value))
            return
        else:
            inside = [item for _, item in items_of(value) or ()]
            if isinstance(value, list):
                self._lists.append((value, list(value)))
            elif isinstance(value, dict):
                self._keep(value)
            elif hasattr(value, "__dict__"):
                self._keep(vars(value))
            if slots_of(value):
                self._slots.append((value, list(slots_of(value).values())))
        for item in inside:
            self._watch(item, depth - 1)

    def is_current(self) -> bool:
        """Tell whether nothing has been assigned since."""
        same = operator.is_
        return not any(self._empty) and (
            all(len(now) == len(then) and all(map(same, now.values(), then)) for now, then in self._dicts)
            and all(len(now) == len(then) and all(map(same, now, then)) for now, then in self._lists)
            and all(contents_of(cell) is then for cell, then in self._cells)
            and all(all(map(same, slots_of(value).values(), then)) for value, then in self._slots)
            and all(_state_of(value) == then for value, then in self._states)
        )


def _state_of(value: Any) -> Any:
    """Return the state of an array or of an iterator that goes on, comparable."""
    return read_array(value) if is_array(value) else position_of(value)


# -- the signature of a call --------------------------------------------------------------------------------------


def signature(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    kind: Kind,
    ambient: Ambient,
) -> tuple[Any, ...] | None:
    """Return what decides the code that a call runs: nesting, dtypes, sizes, and every argument that is not a tensor.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        kind: The sizes that count exactly (of others only which are 0 or 1, and which are equal), and whether values count in
            tensors without gradient.
        ambient: The modes around the call. Which tensors require a gradient counts where gradients are on.

    Returns:
        The signature; None where an argument can only be identified by itself.
    """
    arguments = _Arguments(kind, with_gradients=ambient[0])
    found = tuple(map(arguments.describe, args)), tuple((name, arguments.describe(v)) for name, v in kwargs.items())
    return None if arguments.is_opaque else (ambient, *found)


def names_of_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, str]:
    """Return the names that signatures give to the sizes of a call: equal sizes share one."""
    arguments = _Arguments(((), 0), with_gradients=False)
    for value in (*args, *kwargs.values()):
        arguments.describe(value)
    return arguments.places


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient) -> str:
    """Return a key that distinguishes the calls of one forward: a digest of dtypes, sizes, nesting, plain arguments and modes.

    Modules count by identity. Objects that are neither containers nor dataclasses count by their class, since a cache that all
    layers take grows from one layer to the next.
    """
    describe = _WithinForward().describe
    named = tuple((name, describe(value)) for name, value in kwargs.items())
    return digest((tuple(map(describe, args)), named, ambient))


def proven_digests(
    structure: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    kind: Kind,
    ambient: Ambient,
    without_gradients: bool,
) -> list[str]:
    """Return digests of all calls that a proof of one covers: the same without gradients, or with other sizes and values.

    Each is a text of the kind and a digest (`kind_of_text`). With `without_gradients` it does the same where gradients are off.
    """
    found: list[str] = []
    if kind[1]:  # buffers count too, and a forward may have written them
        return found
    for gradients in (True, False) if without_gradients else (True,):
        call = signature(args, kwargs, kind=kind, ambient=with_gradients(ambient, gradients))
        if call is not None:
            found.append(f"{'+'.join(kind[0])}:{digest((structure, kind, call))}")
    return found


def kind_of_text(proven: str) -> Kind:
    """Return the kind in front of the digest in a result of `proven_digests`."""
    names = proven.partition(":")[0]
    return tuple(names.split("+")) if names else (), 0


def numbers_of(tensor: Tensor) -> str:
    """Return a 64-bit digest of the values in a tensor, as hexadecimal digits; "" of another stage's, which has none here."""
    if isinstance(tensor, WrapperTensor):
        return ""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


class _Arguments(Describer):
    """Describes the arguments of one call."""

    def __init__(self, kind: Kind, *, with_gradients: bool) -> None:
        super().__init__()
        self._exact, self._with_values = kind
        self._with_gradients = with_gradients
        self.places: dict[int, str] = {}
        """Names of sizes, in the order in which they are met."""

    def describe(self, value: Any, depth: int = DEPTH) -> Any:
        if not isinstance(value, Tensor):
            return super().describe(value, depth)
        shape = tuple(map(self._place_of, value.shape))
        needs = value.requires_grad
        numbers = numbers_of(value) if self._with_values and not needs else None
        return str(value.dtype), shape, self._with_gradients and needs, numbers

    def _place_of(self, size: int) -> Any:
        if size < 2:
            return size
        name = self.places.setdefault(size, f"s{len(self.places)}")
        return (name, size) if name in self._exact else name


class _WithinForward(_Coarse):
    """Describes arguments of calls that are compared within one forward."""

    def describe(self, value: Any, depth: int = DEPTH) -> Any:
        if isinstance(value, Tensor):
            return str(value.dtype), tuple(value.shape), value.requires_grad
        return ("module", id(value)) if isinstance(value, nn.Module) else super().describe(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        is_open = isinstance(value, (Mapping, list, tuple, set, frozenset)) or dataclasses.is_dataclass(value)
        return super()._object(value, depth) if is_open else class_name(value)
