"""Buffers and attributes of a layer at one moment, so that its forward can be repeated from there."""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import without_dispatch_modes, without_function_modes
from meshwright.apply.state.arrays import is_array, read_array, shares_memory, write_array
from meshwright.apply.state.copied_iterators import COPIED_ITERATORS, copied
from meshwright.apply.state.generators import is_generator, read_generator, write_generator
from meshwright.apply.state.slots import has_slots, read_slots, write_slots
from meshwright.errors import ApplyError
from meshwright.trees import write_back

__all__: list[str] = []

OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Names in a module's own dict that are torch's: parameters, buffers, children and hooks."""

SMALL_BYTES = 64 * 2**10
"""Tensors up to this size are copied whether or not a forward writes into them [bytes]."""

_DEPTH = 3  # depth of nested containers and objects that are searched
_CONTAINERS = (list, collections.deque, set, dict)
_BASES = (list, collections.deque, set, collections.OrderedDict, dict)
_PLAIN = (int, float, bool, str, bytes, complex, type(None), type, types.FunctionType, types.MethodType, nn.Module)
_WITH_OPTIONS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NOT_STATE = frozenset({"torch", "meshwright", "numpy"}) | sys.stdlib_module_names
_RECORDS = (types.SimpleNamespace, argparse.Namespace, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
"""Classes of the standard library whose objects hold what a script puts there."""


def may_change(value: Any) -> bool:
    """Tell whether an attribute can change without an assignment: a tensor, a container, or a user's object."""
    if isinstance(value, (*_PLAIN, nn.Parameter)):
        return False
    if isinstance(value, tuple):
        return any(map(may_change, value))
    return isinstance(value, (Tensor, *_CONTAINERS)) or is_object(value) or is_whole(value)


def is_whole(value: Any) -> bool:
    """Tell whether a value's state is read and set as a whole, and holds no other values: a generator's, an array's."""
    return is_generator(value) or is_array(value)


def is_object(value: Any) -> bool:
    """Tell whether a value is an object of a user's class, whose attributes are state."""
    kind = type(value)
    if kind in _RECORDS:
        return True
    if kind.__module__.partition(".")[0] in _NOT_STATE:
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or has_slots(kind)


class _KeptTensor:
    """A tensor's values at a moment."""

    def __init__(self, tensor: Tensor) -> None:
        self.has_graph = not tensor.is_leaf
        # Without its graph, which would hold the previous call's, and so on. A repetition needs only the values.
        self.tensor = None if self.has_graph else tensor
        self.version = tensor._version
        self.value: Tensor | None = tensor.detach()
        if not self.has_graph:
            self.value = self.value.clone()
        self.value.requires_grad_(tensor.requires_grad)

    def forget_unchanged(self) -> None:
        """Free a large copy if the tensor is unchanged."""
        tensor, value = self.tensor, self.value
        if tensor is None or value is None or tensor.nbytes <= SMALL_BYTES or type(tensor) is not Tensor:
            return
        if tensor._version == self.version and torch.equal(tensor, value):
            self.value = None

    def give(self, _: dict[int, Any]) -> Tensor:
        if self.value is not None:
            value = self.value
            return value if self.has_graph else value.detach().clone().requires_grad_(value.requires_grad)
        if self.tensor is None or self.tensor._version != self.version:
            raise ApplyError(
                "a later forward of the same layer wrote into a tensor that recompute needs as it was before",
                fix="use recompute=none, or micro_batches=1",
            )
        return self.tensor


class _KeptIterator:
    """An iterator's place at a moment: none can be rewound, so that copies stand in for it."""

    def __init__(self, iterator: Any) -> None:
        self.copy = copied(iterator)

    def give(self, _: dict[int, Any]) -> Any:
        return copied(self.copy)


class _KeptInside:
    """Contents of a container or an object at a moment."""

    def __init__(self, value: Any, keep: Any) -> None:
        self.value = value
        parts = read_parts(value)
        self.parts = {name: keep(item) for name, item in parts.items()} if isinstance(parts, dict) else parts
        if isinstance(parts, list):
            self.parts = [keep(item) for item in parts]

    def give(self, given: dict[int, Any]) -> Any:
        if id(self) not in given:
            given[id(self)] = self.value
            parts = self.parts
            if isinstance(parts, dict):
                parts = {name: _give(item, given) for name, item in parts.items()}
            elif isinstance(parts, list):
                parts = [_give(item, given) for item in parts]
            write_parts(self.value, parts)
        return self.value


def _may_keep_state(module: nn.Module) -> bool:
    """Tell whether a forward may leave state on a module; torch's own plain layers have only parameters."""
    if not type(module).__module__.startswith("torch.nn.modules.") or module._buffers:
        return True
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    is_set_by_others = isinstance(module, _WITH_OPTIONS)
    return bool(has_hooks) or is_set_by_others or any(isinstance(value, Tensor) for value in vars(module).values())


def read_parts(value: Any) -> Any:
    """Return a shallow copy of the contents of a dict, list, set or object; of a generator or an array its state."""
    if is_generator(value):
        return read_generator(value)
    if is_array(value):
        return read_array(value)
    if isinstance(value, _BASES):  # not by the class's own methods: some give for an entry what they make of it
        base = _base_of(value)
        if isinstance(value, dict):
            return dict(base.items(value))
        return set(base.__iter__(value)) if isinstance(value, set) else list(base.__iter__(value))
    return {**getattr(value, "__dict__", {}), **read_slots(value)}


def write_parts(value: Any, parts: Any) -> None:
    """Set the contents of a container or an object, or the state of a generator or an array."""
    if is_generator(value):
        write_generator(value, parts)
        return
    if is_array(value):
        write_array(value, parts)
        return
    target: Any = value
    if not isinstance(value, _CONTAINERS):
        parts = write_slots(value, parts)
        target = getattr(value, "__dict__", {})
    _write_entries(target, parts)


def _write_entries(target: Any, parts: Any) -> None:
    """Set the entries of a container that has others; where its class refuses (a frozen configuration), by its base's methods."""
    if _ids_of(target) == _ids_of(parts):
        return
    try:
        target.clear()
        target.extend(parts) if isinstance(parts, list) else target.update(parts)
    except Exception:  # noqa: BLE001 - whatever the class refuses with
        base = _base_of(target)
        base.clear(target)
        if isinstance(parts, list):
            base.extend(target, parts)
        elif isinstance(parts, set):
            base.update(target, parts)
        else:
            for key, value in parts.items():  # OrderedDict.update would call the class's own __setitem__
                base.__setitem__(target, key, value)


def _ids_of(parts: Any) -> Any:
    if isinstance(parts, set):
        return set(map(id, _base_of(parts).__iter__(parts)))
    if isinstance(parts, dict):
        return [(id(key), id(value)) for key, value in _base_of(parts).items(parts)]
    return list(map(id, _base_of(parts).__iter__(parts)))


def _base_of(container: Any) -> Any:
    return next(kind for kind in _BASES if isinstance(container, kind))


def _give(kept: Any, given: dict[int, Any]) -> Any:
    if isinstance(kept, (_KeptTensor, _KeptInside, _KeptIterator)):
        if id(kept) not in given:
            given[id(kept)] = kept.give(given)
        return given[id(kept)]
    return tuple(_give(item, given) for item in kept) if type(kept) is tuple else kept


class Moment:
    """Buffers and attributes of some modules at one moment; see `Attributes.take`."""

    def __init__(self, ids: list[int], plain: list[dict[str, Any]], deep: Sequence[tuple[int, str, Any]]) -> None:
        self.ids = ids
        self.is_shallow = not deep
        self.is_still = False
        """Whether the forward that began then has changed nothing."""
        self._kept: dict[int, Any] = {}
        self._iterators: dict[int, _KeptIterator] = {}
        self._plain = plain
        self._deep = [(index, name, self._keep(value, _DEPTH)) for index, name, value in deep]

    def _keep(self, value: Any, depth: int) -> Any:
        if isinstance(value, COPIED_ITERATORS):
            if id(value) not in self._iterators:
                self._iterators[id(value)] = _KeptIterator(value)
            return self._iterators[id(value)]
        if not may_change(value):
            return value
        if type(value) is tuple:
            return tuple(self._keep(item, depth) for item in value)
        found = self._kept.get(id(value))
        if found is None and isinstance(value, Tensor):
            found = self._kept[id(value)] = _KeptTensor(value)
        elif found is None and depth and not isinstance(value, tuple):
            found = self._kept[id(value)] = _KeptInside(value, lambda item: self._keep(item, depth - 1))
        return value if found is None else found

    def forget_unchanged(self) -> None:
        """Free unneeded copies; called when the forward is over."""
        if self.is_shallow:
            return
        with _unseen():
            for kept in self._kept.values():
                if isinstance(kept, _KeptTensor):
                    kept.forget_unchanged()
        self._kept = {key: kept for key, kept in self._kept.items() if isinstance(kept, _KeptInside)}

    def install(self, slots: Sequence[dict[str, Any]]) -> None:
        """Restore the modules' state."""
        for own, plain in zip(slots, self._plain, strict=True):
            own.clear()
            own.update(plain)
        if self.is_shallow:
            return
        given: dict[int, Any] = {}
        with _unseen():
            for index, name, kept in self._deep:
                slots[index][name] = _give(kept, given)

    def insides(self) -> list[tuple[Any, Any]]:
        """Return the recorded containers and objects with their present contents."""
        found = [kept.value for kept in self._kept.values()]
        return [(value, read_parts(value)) for value in found]


@contextlib.contextmanager
def insides_put_back(*values: Any, depth: int = 8) -> Iterator[None]:
    """Restore the contents of the containers and objects among these values after the context, tensors' entries included.

    A cache of two caches, as an encoder and a decoder have it, holds its tensors six levels below a call's arguments.
    """
    insides: dict[int, tuple[Any, Any]] = {}
    tensors: dict[int, tuple[Tensor, int, Tensor]] = {}

    def keep(value: Any, left: int) -> None:
        if id(value) in insides or id(value) in tensors or not may_change(value) or not left:
            return
        if isinstance(value, Tensor):
            if type(value) is Tensor:
                tensors[id(value)] = value, value._version, value.detach().clone()
            return
        parts = value if isinstance(value, tuple) else read_parts(value)
        if not isinstance(value, tuple):
            insides[id(value)] = value, parts
        items = parts.values() if isinstance(parts, dict) else parts
        for item in () if is_whole(value) else items:
            keep(item, left - 1)

    with _unseen():
        for value in values:
            keep(value, depth)
    try:
        yield
    finally:
        with _unseen():
            for value, parts in insides.values():
                write_parts(value, parts)
            for tensor, version, entries in tensors.values():
                if tensor._version != version:
                    write_back(tensor, entries, version)


class Attributes:
    """The buffers and attributes of a layer and of the modules in it."""

    def __init__(self, layer: nn.Module) -> None:
        children = [child for child in layer.modules() if _may_keep_state(child)]
        self._slots = [vars(child) for child in children] + [child._buffers for child in children]
        self._ids: list[int] = []
        self._plain: list[dict[str, Any]] = []
        self._deep: list[tuple[int, str]] = []

    def _read_ids(self) -> list[int]:
        return list(map(id, itertools.chain.from_iterable(map(dict.values, self._slots))))

    def take(self) -> Moment:
        """Record the present state."""
        ids = self._read_ids()
        if ids != self._ids:
            self._deep = [
                (index, name)
                for index, own in enumerate(self._slots)
                for name, value in own.items()
                if name not in OF_TORCH and (may_change(value) or isinstance(value, COPIED_ITERATORS))
            ]
            apart = set(self._deep)
            # Without values that may hold a graph, which would live as long as this record.
            self._plain = [
                {name: value for name, value in own.items() if (index, name) not in apart}
                for index, own in enumerate(self._slots)
            ]
            self._refuse_shared_memory()
            self._ids = ids  # what is refused in a trial is refused again
        if not self._deep:
            return Moment(ids, self._plain, ())
        with _unseen():
            return Moment(ids, self._plain, [(index, name, self._slots[index][name]) for index, name in self._deep])

    def _refuse_shared_memory(self) -> None:
        """Refuse tensors that an array of the layer lies in: what a forward writes into one appears in both."""
        held = [(name, self._slots[index][name]) for index, name in self._deep]
        arrays = [(name, value) for name, value in held if is_array(value)]
        for array, value in arrays:
            for name, tensor in held:
                if isinstance(tensor, Tensor) and shares_memory(value, tensor):
                    raise ApplyError(
                        f"the array '{array}' and the tensor '{name}' of a layer lie in the same memory, and recompute restores "
                        "each by itself",
                        fix=f"use recompute=none, or write into '{name}' by torch and leave '{array}' out",
                    )

    def forward_is_over(self, moment: Moment) -> None:
        """End the forward that began at a moment: what it left unchanged need not be kept."""
        moment.forget_unchanged()
        moment.is_still = moment.is_shallow and self._read_ids() == moment.ids

    @contextlib.contextmanager
    def as_of(self, moment: Moment) -> Iterator[None]:
        """Restore the layer's state of a moment inside the context, and its present state after it."""
        if moment.is_still and self._read_ids() == moment.ids:
            yield  # the first forward changed nothing, and no other code has since
            return
        now = [dict(own) for own in self._slots]
        insides = moment.insides()
        moment.install(self._slots)
        try:
            yield
        finally:
            for value, parts in insides:
                write_parts(value, parts)
            for own, content in zip(self._slots, now, strict=True):
                own.clear()
                own.update(content)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    with without_dispatch_modes(), without_function_modes(), torch.no_grad():
        yield
