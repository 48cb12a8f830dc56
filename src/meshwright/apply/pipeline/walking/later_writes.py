"""State of layers that other code uses: attributes without tensors, and buffers.

Only the stage that runs a layer sees what its calls write there. What they write with the first batch is known before the layers
are dealt out. Here is what they begin to write later, on another branch.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import without_function_modes
from meshwright.apply.pipeline.tracing.call_trace import Slot
from meshwright.apply.pipeline.tracing.stage_map import StageMap
from meshwright.apply.pipeline.walking.plain_facts import facts_in
from meshwright.apply.state.outside import names_of
from meshwright.errors import ApplyError
from meshwright.trees import memory_key, tensors_in

__all__: list[str] = []

_UNSEEN = frozenset({"data", "batch_norm", "instance_norm"})
"""Names of what changes a tensor's numbers and not its version."""

_NOTHING = contextlib.nullcontext()

_Taken = list[tuple[Slot, Tensor, int, Any, Tensor | None]]
"""Buffers before a call: (where, tensor, version, memory, copy where the layer's code may write without a new version)."""


class LaterWrites:
    """The watched state of a model's layers on one rank.

    Args:
        module: The model.
        stage_map: Which stage runs what.
        in_parts: Whether layers will be cut. A cut one has other sizes in its attributes, and shorter buffers, than a whole one,
            and the whole one's where it runs whole: only what is neither is compared.
    """

    def __init__(self, module: nn.Module, stage_map: StageMap, *, in_parts: bool) -> None:
        self._written: dict[int, tuple[Tensor, str, Slot]] = {}
        """Id -> (buffer, layer, where) of what a layer has changed here."""
        self._module = module
        self._map = stage_map
        self._in_parts = in_parts
        self._owners: dict[Slot, nn.Module] = {}
        slots = [slot for slots in stage_map.flow.watched.values() for slot in slots if in_parts]
        self._whole = {slot: facts_in([self._of(slot)]) for slot in slots if type(self._of(slot)) in (int, tuple)}
        self._first: dict[Slot, tuple[float, ...]] = {}
        self._modules: dict[str, list[tuple[str, nn.Module, frozenset[str]]]] = {}
        self._named = frozenset(stage_map.flow.named)
        self._with_buffers: frozenset[str] = frozenset()
        self._unseen: dict[type, bool] = {}

    def begin(self) -> None:
        """Take what there is now, once layers are cut, as what all stages have."""
        flow = self._map.flow
        for unit in flow.units:
            children = self._module.get_submodule(unit).named_modules(prefix=unit)
            own = [(name, child) for name, child in children if not type(child).__module__.startswith("torch.")]
            self._modules[unit] = [(name, child, frozenset({*vars(child), *child._buffers})) for name, child in own]
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
            changed = [
                facts not in (self._first[slot], self._whole.get(slot))
                for slot, facts in zip(slots, of_each, strict=True)
            ]
            values = [(at, value) for at, (value, differs) in enumerate(zip(values, changed, strict=True)) if differs]
        values += [(*slot, self._of(slot)) for slot in self._late(unit)]
        return facts_in(values) if values else ()

    def _of(self, slot: Slot) -> Any:
        owner = self._owners.get(slot) or self._module.get_submodule(slot[0])
        value = getattr(owner, slot[1], None)
        return tuple(value.shape) if isinstance(value, Tensor) else value

    def _late(self, unit: str) -> Iterator[Slot]:
        """Yield attributes and buffers that a layer did not have at the beginning, and that code between layers names."""
        for name, child, known in self._modules[unit]:
            own = vars(child)
            if len(own) + len(child._buffers) != len(known):
                fresh = ((own.keys() | child._buffers.keys()) - known) & self._named
                yield from ((name, key) for key in sorted(fresh) if not isinstance(own.get(key), nn.Parameter))

    def call(self, unit: str) -> contextlib.AbstractContextManager[None]:
        """Take note of the buffers that a layer's call changes inside the context.

        Raises:
            ApplyError: Another layer, on another stage, uses one of them.
        """
        return self._call(unit) if unit in self._with_buffers else _NOTHING

    @contextlib.contextmanager
    def _call(self, unit: str) -> Iterator[None]:
        with without_function_modes():
            before = self._take(unit)
        yield
        with without_function_modes():
            self._compare(unit, before)

    def _compare(self, unit: str, before: _Taken) -> None:
        for slot, tensor, version, memory, copy in before:
            now = getattr(self._owners[slot], slot[1], None)
            is_same = now is tensor and tensor._version == version and memory_key(tensor) == memory
            if is_same and (copy is None or torch.equal(copy, tensor)):
                continue
            for place, reader in self._map.flow.lent.get(unit, ()):
                if place == slot and set(self._map.calls[reader]) != set(self._map.calls[unit]):
                    raise _refusal(unit, slot, f"layer '{reader}', on another stage, uses")
            if isinstance(now, Tensor):
                self._written[id(now)] = now, unit, slot

    def refuse_written(self, given: Any) -> None:
        """Refuse code between layers that uses a buffer whose numbers are this stage's alone.

        Raises:
            ApplyError: It does.
        """
        if not self._written:
            return
        for tensor in tensors_in(given):
            for held in (tensor, tensor._base):
                if id(held) in self._written:
                    raise _refusal(*self._written[id(held)][1:], "code between layers uses")

    def _take(self, unit: str) -> _Taken:
        found: _Taken = []
        for slot in self._map.flow.watched.get(unit, ()):
            owner = self._owners[slot]
            tensor = owner._buffers.get(slot[1])
            if tensor is not None:
                copy = tensor.clone() if self._writes_unseen(type(owner)) else None
                found.append((slot, tensor, tensor._version, memory_key(tensor), copy))
        return found

    def _writes_unseen(self, kind: type) -> bool:
        """Tell whether methods of a class may change numbers without a new version of the tensor, as torch's norms do."""
        if kind not in self._unseen:
            bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
            own = [value for base in bases for value in vars(base).values()]
            codes = [value.__code__ for value in own if isinstance(value, types.FunctionType)]
            is_torchs = any(base.__module__.startswith("torch.") for base in bases)
            self._unseen[kind] = is_torchs or any(not _UNSEEN.isdisjoint(names_of(code)) for code in codes)
        return self._unseen[kind]


def _refusal(unit: str, slot: Slot, user: str) -> ApplyError:
    return ApplyError(
        f"layer '{unit}' has changed the buffer '{slot[1]}' of '{slot[0] or 'the model itself'}', and {user} it; "
        "other stages have the old one",
        fix="return the numbers from the layer with its result; or use pp=1",
    )
