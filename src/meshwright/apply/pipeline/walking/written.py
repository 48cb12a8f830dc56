"""Tensors that a layer leaves beside its results, on the stage that runs it: in containers, objects and attributes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from meshwright.apply.pipeline.tracing.call_trace import Slot
from meshwright.apply.pipeline.tracing.scene import Effect, Path, fields_of, places_in, tensors_below, tensors_of_call
from meshwright.apply.pipeline.walking.stand_ins import StandIn
from meshwright.apply.state.buffers import holds_values
from meshwright.errors import ApplyError
from meshwright.trees import LEAVES, like_mapping, map_tensors

__all__: list[str] = []


def written_tensors(places: Sequence[tuple[Path, Any]], model: nn.Module, leaves: Sequence[Slot]) -> Iterator[Tensor]:
    """Yield the tensors in the places that a call could write into, and in the attributes that it is known to write."""
    if places:
        yield from tensors_of_call((), {}, places)
    for module, attribute in leaves:
        yield from tensors_below(vars(model.get_submodule(module)).get(attribute))


def places_of_slots(model: nn.Module, slots: Sequence[Slot]) -> list[tuple[Path, Any]]:
    """Return these attributes as places that can be written: a dict of the attribute alone, and the containers below it."""
    found: list[tuple[Path, Any]] = []
    for module, attribute in slots:
        attributes = vars(model.get_submodule(module))
        if attribute in attributes:
            item = attributes[attribute]
            if isinstance(item, (Tensor, tuple)):
                found.append(((("slot", module), attribute), _WrittenAttribute(attributes, attribute)))
            found += [((("slot", module), attribute, *path), place) for path, place in places_in([(0, item)])]
    return found


class _WrittenAttribute(dict[str, Any]):
    """One attribute of a module, as a dict that writes through."""

    def __init__(self, attributes: dict[str, Any], name: str) -> None:
        super().__init__({name: attributes[name]})
        self._attributes = attributes

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._attributes[key] = value


def refuse_unseen(unit: str, effects: Sequence[Effect], leaves: Sequence[Slot]) -> None:
    """Refuse a call that leaves tensors in attributes where the first batch's calls left none.

    Raises:
        ApplyError: It does.
    """
    for effect in effects:
        slot = effect.slot
        if slot is not None and slot not in leaves:
            raise ApplyError(
                f"layer '{unit}' leaves a tensor in the attribute '{slot[1]}' of '{slot[0] or 'the model itself'}', which it "
                "did not do when the first batch was looked at; other stages would not have it",
                fix="pass an example_batch= to apply_plan with which it does so, keep the tensor as a buffer (register_buffer), "
                "return it, or use pp=1",
            )


def map_results(outputs: Any, function: Callable[[Tensor], Tensor], held: Collection[int] = ()) -> Any:
    """Return a layer's results with a function applied to each tensor; those in objects' attributes are replaced in place.

    Args:
        outputs: The results.
        function: Applied to each tensor, once.
        held: Ids of lists, dicts and attribute dicts among the layer's arguments: they stay as they are.
    """
    if isinstance(outputs, Tensor):
        return function(outputs)
    return _Results(function, held).map(outputs, _DEPTH)


_DEPTH = 8


class _Results:
    def __init__(self, function: Callable[[Tensor], Tensor], held: Collection[int]) -> None:
        self._function = function
        self._held = held
        self._done: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []

    def map(self, item: Any, depth: int) -> Any:
        if isinstance(item, Tensor):
            if id(item) not in self._done:
                new = self._function(item)
                self._alive.append(item)
                self._done[id(item)] = self._done[id(new)] = new
            return self._done[id(item)]
        if type(item) in LEAVES or not depth or id(item) in self._held:
            return item
        if type(item) in (tuple, list):
            return type(item)([self.map(part, depth - 1) for part in item])
        if isinstance(item, tuple) and hasattr(item, "_fields") and not isinstance(item, PackedSequence):
            return type(item)(*[self.map(part, depth - 1) for part in item])
        if isinstance(item, Mapping):
            values = {key: self.map(part, depth - 1) for key, part in item.items()}
            return item if all(values[key] is item[key] for key in values) else like_mapping(item, values)
        attributes = None if isinstance(item, (list, tuple, dict)) else fields_of(item)
        if attributes is None or dataclasses.is_dataclass(item):
            return (
                map_tensors(item, lambda tensor: self.map(tensor, depth)) if id(attributes) not in self._held else item
            )
        if id(attributes) not in self._held:
            for key, part in list(attributes.items()):
                new = self.map(part, depth - 1)
                if new is not part:
                    attributes[key] = new
        return item


def versions_of(tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was written in place so far."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors of inference mode have none
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def is_state(tensor: Tensor, model: nn.Module) -> bool:
    """Tell whether a tensor is memory of a parameter or buffer of a model that this rank holds."""
    if isinstance(tensor, StandIn) or tensor.layout != torch.strided or not holds_values(tensor):
        return False
    held = (state for state in itertools.chain(model.parameters(), model.buffers()) if holds_values(state))
    place = tensor.untyped_storage().data_ptr()
    return any(state.layout == torch.strided and state.untyped_storage().data_ptr() == place for state in held)
