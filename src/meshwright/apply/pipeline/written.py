"""What a layer leaves beside its results, on the stage that runs it: tensors in containers, objects and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.apply.pipeline.scene import Effect, Path, Places, places_of_call, tensors_of_call
from meshwright.describe.tree import LEAVES, map_tensors
from meshwright.errors import ApplyError

__all__: list[str] = []

Slot = tuple[str, str]
"""A module's name and the name of an attribute."""


def written_tensors(
    call: tuple[tuple[Any, ...], dict[str, Any]], model: nn.Module, leaves: Sequence[Slot]
) -> Iterator[Tensor]:
    """Yield the tensors in what a call was given, and in the attributes that it is known to write."""
    places = places_of_call(*call)
    if places:
        yield from tensors_of_call((), {}, places)
    for module, attribute in leaves:
        item = vars(model.get_submodule(module)).get(attribute)
        if isinstance(item, Tensor):
            yield item
        else:
            yield from tensors_of_call((item,), {}, Places([(0, item)]).found)


def places_of_slots(model: nn.Module, slots: Sequence[Slot]) -> list[tuple[Path, Any]]:
    """Return what is in these attributes as places that can be written: a dict of the attribute alone, and what is below."""
    found: list[tuple[Path, Any]] = []
    for module, attribute in slots:
        attributes = vars(model.get_submodule(module))
        if attribute in attributes:
            item = attributes[attribute]
            if isinstance(item, (Tensor, tuple)):
                found.append(((("slot", module), attribute), _Slot(attributes, attribute)))
            found += [((("slot", module), attribute, *path), place) for path, place in Places([(0, item)]).found]
    return found


class _Slot(dict[str, Any]):
    """One attribute of a module, written through."""

    def __init__(self, attributes: dict[str, Any], name: str) -> None:
        super().__init__({name: attributes[name]})
        self._attributes = attributes

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._attributes[key] = value


def refuse_unseen(unit: str, effects: Sequence[Effect], leaves: Sequence[Slot]) -> None:
    """Refuse a call that leaves tensors in attributes in which the first batch's calls left none.

    Raises:
        ApplyError: It does.
    """
    for effect in effects:
        first = effect.path[0]
        if not isinstance(first, tuple):
            continue
        attribute = effect.path[1] if len(effect.path) > 1 else effect.key
        if (first[1], attribute) not in leaves:
            raise ApplyError(
                f"layer '{unit}' leaves a tensor in the attribute '{attribute}' of '{first[1] or 'the model itself'}', which it "
                "did not with the first batch; other stages would not find it",
                fix="pass an example_batch= to apply_plan with which it does so, return the tensor, or use pp=1",
            )


def map_results(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a layer's results with a function applied to each tensor; those inside of objects are replaced there."""
    if isinstance(outputs, Tensor):
        return function(outputs)
    if type(outputs) in LEAVES:
        return outputs
    done: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            new = function(tensor)
            done[id(tensor)] = done[id(new)] = new
        return done[id(tensor)]

    outputs = map_tensors(outputs, once)
    for path, place in Places([(0, outputs)]).found:
        if "__dict__" in path:
            for key, item in enumerate(place) if isinstance(place, list) else list(place.items()):
                if isinstance(item, Tensor) and id(item) not in done:
                    place[key] = once(item)
    return outputs
