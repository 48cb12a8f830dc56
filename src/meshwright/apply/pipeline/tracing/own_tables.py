"""Tables that a layer makes of sizes alone, and keeps in attributes for its own later calls: cosines of positions, a causal mask.

The stage that runs the layer is the only one that needs them. Other stages do not repeat such writes: a number beside the table
tells when it is replaced (`if length > self.longest`), and they do not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.apply.pipeline.tracing.call_trace import Slot
from meshwright.apply.pipeline.tracing.shared_state import SharedState
from meshwright.apply.pipeline.walking.stand_ins import value_of
from meshwright.trees import tensors_in

__all__: list[str] = []

_KIND_OF_FIRST = ("to", "type_as")
"""Functions that take another tensor for its dtype and device [names]."""


class OwnTables:
    """Where the tensors that units leave in attributes come from, and who uses them beside their unit."""

    def __init__(self) -> None:
        self._of_values: set[int] = set()
        self._made: set[int] = set()
        self._slots: dict[int, Slot] = {}
        self._others: set[Slot] = set()
        self._alive: list[Any] = []

    def note_made(
        self, func: Callable[..., Any], given: Any, results: Any, of_values: Iterable[Container[int]]
    ) -> None:
        """Record results of a function that a unit's code calls.

        Args:
            func: The function.
            given: Its arguments, (args, kwargs).
            results: What it returned, and what it has written into.
            of_values: Ids of parameters, of buffers that units have changed, and of what this unit was given.
        """
        if getattr(func, "__name__", "") in _KIND_OF_FIRST:
            given = given[0][:1]
        known = (self._of_values, *of_values)
        has_values = any(value_of(t) is not None or any(id(t) in ids for ids in known) for t in tensors_in(given))
        for tensor in tensors_in(results):
            self._alive.append(tensor)  # an id identifies a tensor only while the tensor lives
            self._made.add(id(tensor))
            if has_values:
                self._of_values.add(id(tensor))

    def note_left(self, slot: Slot, tensors: Iterable[Tensor], *, looks: bool) -> None:
        """Record tensors that a unit has left in an attribute, and whether its code looks at values, which may be in them."""
        for tensor in tensors:
            if looks or id(tensor) not in self._made or id(tensor) in self._of_values:
                self._others.add(slot)
            self._alive.append(tensor)
            self._slots[id(tensor)] = slot

    def note_used(self, given: Any) -> None:
        """Record that other code than the unit's uses tensors."""
        if self._slots:
            for tensor in tensors_in(given):
                for held in (tensor, tensor._base):
                    if id(held) in self._slots:
                        self._others.add(self._slots[id(held)])

    def find(
        self,
        module: nn.Module,
        leaves: Mapping[str, Sequence[Slot]],
        takes: Mapping[str, Sequence[Slot]],
        units: Collection[str],
        shared: SharedState,
    ) -> set[Slot]:
        """Return the attributes with tables that one unit alone needs.

        Args:
            module: The model.
            leaves: Unit's name -> attributes in which it leaves tensors.
            takes: Unit's name -> attributes of which it takes tensors that another call has made.
            units: Names of all units.
            shared: Tells who else uses an attribute, by its names.
        """
        taken = {slot for slots in takes.values() for slot in slots}
        tables = {*self._slots.values()} - self._others - taken
        children = {name: {id(child) for child in module.get_submodule(name).modules()} for name in units}
        return {
            slot
            for unit, slots in leaves.items()
            for slot in slots
            if slot in tables
            and [name for name in units if id(module.get_submodule(slot[0])) in children[name]] == [unit]
            and not shared.is_used_outside(unit, slot)
        }
