"""State of layers that other code uses: attributes without tensors, and buffers.

Only the stage that runs a layer sees what its calls write there. What they write with the first batch is known before the layers
are dealt out. Here is what they begin to write later, on another branch.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.tracing.stage_map import StageMap
from meshwright.apply.pipeline.walking.plain_facts import facts_in
from meshwright.apply.pipeline.walking.written import Slot
from meshwright.apply.state.attributes import OF_TORCH
from meshwright.apply.state.outside import names_of
from meshwright.errors import ApplyError
from meshwright.trees import memory_key, tensors_in

__all__: list[str] = []

_NOTHING = contextlib.nullcontext()

_Taken = list[tuple[Slot, Tensor, int, Any, Tensor | None]]
"""Buffers before a call: (where, tensor, version, memory, copy where the layer's code may write without a new version)."""


class LaterWrites:
    """The watched state of a model's layers on one rank.

    Args:
        module: The model.
        stage_map: Which stage runs what.
        in_parts: Whether layers are cut. A cut one has other integers in its attributes, and shorter buffers, than a whole one:
            only what has changed since `begin` is compared.
    """

    def __init__(self, module: nn.Module, stage_map: StageMap, *, in_parts: bool) -> None:
        self._written: list[tuple[Tensor, str, Slot]] = []
        """(buffer, layer, where) of what a layer has changed here."""
        self._module = module
        self._map = stage_map
        self._in_parts = in_parts
        self._owners: dict[Slot, nn.Module] = {}
        self._first: dict[Slot, tuple[float, ...]] = {}
        self._modules: dict[str, list[tuple[str, nn.Module, int, int]]] = {}
        self._with_buffers: frozenset[str] = frozenset()
        self._by_data: dict[type, bool] = {}

    def begin(self) -> None:
        """Take what there is now, once layers are cut, as what all stages have."""
        flow = self._map.flow
        for unit in flow.units:
            children = self._module.get_submodule(unit).named_modules(prefix=unit)
            own = [(name, child) for name, child in children if not type(child).__module__.startswith("torch.")]
            self._modules[unit] = [(name, child, len(vars(child)), len(child._buffers)) for name, child in own]
        self._owners = {slot: self._module.get_submodule(slot[0]) for slots in flow.watched.values() for slot in slots}
        self._first = {slot: facts_in([self._of(slot)]) for slot in self._owners}
        self._with_buffers = frozenset(
            unit for unit, slots in flow.watched.items() if any(s[1] in self._owners[s]._buffers for s in slots)
        )

    def facts(self, unit: str) -> tuple[float, ...]:
        """Return what stages compare of a layer's state after its call."""
        slots = self._map.flow.watched.get(unit, ())
        values = [self._of(slot) for slot in slots]
        if self._in_parts and values:
            of_each = [facts_in([value]) for value in values]
            changed = [self._first[slot] != facts for slot, facts in zip(slots, of_each, strict=True)]
            values = [(at, value) for at, (value, differs) in enumerate(zip(values, changed, strict=True)) if differs]
        values += [(*slot, self._of(slot)) for slot in self._late(unit)]
        return facts_in(values) if values else ()

    def _of(self, slot: Slot) -> Any:
        owner = self._owners.get(slot) or self._module.get_submodule(slot[0])
        value = getattr(owner, slot[1], None)
        return tuple(value.shape) if isinstance(value, Tensor) else value

    def _late(self, unit: str) -> Iterator[Slot]:
        """Yield attributes and buffers that a layer did not have at the beginning, and that code between layers names."""
        if not self._map.flow.named:
            return
        for name, child, attributes, buffers in self._modules[unit]:
            if len(vars(child)) != attributes or len(child._buffers) != buffers:
                known = {key for of, key in self._map.flow.watched.get(unit, ()) if of == name}
                for key in self._map.flow.named:
                    is_there = key in child._buffers or (key in vars(child) and key not in OF_TORCH)
                    if is_there and key not in known and (name, key) not in self._first:
                        yield name, key

    def call(self, unit: str) -> contextlib.AbstractContextManager[None]:
        """Take note of the buffers that a layer's call changes inside the context.

        Raises:
            ApplyError: Another layer, on another stage, uses one of them.
        """
        return self._call(unit) if unit in self._with_buffers else _NOTHING

    @contextlib.contextmanager
    def _call(self, unit: str) -> Iterator[None]:
        before = self._take(unit)
        yield
        for slot, tensor, version, memory, copy in before:
            now = getattr(self._owners[slot], slot[1], None)
            is_same = now is tensor and tensor._version == version and memory_key(tensor) == memory
            if is_same and (copy is None or torch.equal(copy, tensor)):
                continue
            for place, reader in self._map.flow.lent.get(unit, ()):
                if place == slot and set(self._map.calls[reader]) != set(self._map.calls[unit]):
                    raise _refusal(unit, slot, f"layer '{reader}', on another stage, uses")
            if isinstance(now, Tensor) and all(known is not now for known, *_ in self._written):
                self._written.append((now, unit, slot))

    def refuse_written(self, given: Any) -> None:
        """Refuse code between layers that uses a buffer whose numbers are this stage's alone.

        Raises:
            ApplyError: It does.
        """
        if not self._written:
            return
        for tensor in tensors_in(given):
            for buffer, unit, slot in self._written:
                if tensor is buffer or tensor._base is buffer:
                    raise _refusal(unit, slot, "code between layers uses")

    def _take(self, unit: str) -> _Taken:
        found: _Taken = []
        for slot in self._map.flow.watched.get(unit, ()):
            owner = self._owners[slot]
            tensor = owner._buffers.get(slot[1])
            if tensor is not None:
                copy = tensor.clone() if self._writes_data(type(owner)) else None
                found.append((slot, tensor, tensor._version, memory_key(tensor), copy))
        return found

    def _writes_data(self, kind: type) -> bool:
        """Tell whether methods of a class name `data`, through which numbers change without a new version of the tensor."""
        if kind not in self._by_data:
            own: Sequence[Any] = [value for base in kind.__mro__ for value in vars(base).values()]
            codes = [value.__code__ for value in own if isinstance(value, types.FunctionType)]
            self._by_data[kind] = any("data" in names_of(code) for code in codes)
        return self._by_data[kind]


def _refusal(unit: str, slot: Slot, user: str) -> ApplyError:
    return ApplyError(
        f"layer '{unit}' has changed the buffer '{slot[1]}' of '{slot[0] or 'the model itself'}', which it did not do with the "
        f"first batch, and {user} it; other stages have the old one",
        fix="return the numbers from the layer with its result; or use pp=1",
    )
