"""Calls of a traced forward in their order, with the cost, the parameters, the reads and the writes of each.

The sequence of unit calls is the chain that is cut into stages. Every forward has such a sequence, and no tensor is used before
it is computed; so a connection that skips stages always skips forward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from meshwright.apply.modules.forwards import users_class
from meshwright.apply.state.class_identity import find_object_identity
from meshwright.errors import ApplyError
from meshwright.schedule.balance import work_of

__all__: list[str] = []

Slot = tuple[str, str]
"""A module's name and the name of an attribute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitCall:
    """One call of a unit."""

    unit: str
    """The module's name."""
    flops: int
    """Floating-point operations of the forward, 1 multiply-add = 2 [FLOPs]."""
    parameters: tuple[str, ...]
    """FQNs of what it uses: its own, and those that its code or the code after it looked up elsewhere."""
    takes: tuple[int, ...] = ()
    """Places of the calls of whose results it is given tensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """A forward as a sequence of unit calls.

    Args:
        calls: The calls of units, in the order in which they ran.
        units: Names of the modules whose calls are assigned to stages.
        idle: Unit's name -> FQNs of its parameters, for units that were not called.
        draws: Whether the code between the units drew random numbers, by which it may leave units out.
        reads: What the model's code between the units read of a tensor that a unit computes, in ways that other stages cannot
            follow, as text.
        firsts: What it read in ways that they can, once they receive the tensor, as text -> the place of the call that computes
            it. All calls up to that one belong to the first stage: a stage before it would have to wait for the tensor.
        shown: Texts that it made of such a tensor, to print it for example, as text.
        draws_python: Units that may draw from Python's or NumPy's global generator; "" where the code between them does.
        leaves: Unit's name -> (module, attribute) in which its calls leave tensors.
        own_tables: (module, attribute) in which calls leave tensors made of sizes alone, which no other unit's code uses.
        watched: Unit's name -> (module, attribute) of its modules that the code between units or another unit uses, and that its
            calls may write with later batches: buffers, and attributes without tensors.
        lent: Unit's name -> (one of these, another unit that uses it).
        named: Names that the code between units loads of anything: an attribute that a unit sets later may be one.
        takes: Unit's name -> (module, attribute) of which its calls take tensors that others have computed.
        opens: Units whose calls use other units' tensors in attributes of objects that they are given.
        leaks: Tensors that came out of a unit in ways that cannot be followed, as text.
        shared: What a unit changes outside of its module, and others use, as text.
        looks: Units whose code looks at values inside: a number that it reads, a mask, a choice.
        of_numbers: Units that take numbers of other units' tensors, not their sizes alone, or draw some.
        told: Of those that look at values the ones whose results hold what values decide, beside numbers in tensors: a size, a
            Python number. The first stage, which has it, tells the others.
        offered: Those that return more than tensors. Where they run on the first stage it tells the others, too: values that
            nobody has tried may change a number, a text or a kind.
        has_loss_beside: Whether the loss takes tensors of units beside the model's outputs.
        counts: Units whose calls change attributes that hold no tensors: a count of calls, a list.
        bonds: What a unit changes in attributes and other units use, as text -> these units, which belong to one stage.
    """

    calls: tuple[UnitCall, ...]
    units: tuple[str, ...]
    idle: dict[str, tuple[str, ...]]
    draws: bool
    reads: tuple[str, ...]
    draws_python: tuple[str, ...] = ()
    leaves: dict[str, tuple[Slot, ...]] = dataclasses.field(default_factory=dict)
    own_tables: tuple[Slot, ...] = ()
    watched: dict[str, tuple[Slot, ...]] = dataclasses.field(default_factory=dict)
    lent: dict[str, tuple[tuple[Slot, str], ...]] = dataclasses.field(default_factory=dict)
    named: tuple[str, ...] = ()
    takes: dict[str, tuple[Slot, ...]] = dataclasses.field(default_factory=dict)
    opens: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    looks: tuple[str, ...] = ()
    of_numbers: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    has_loss_beside: bool = False
    firsts: dict[str, int] = dataclasses.field(default_factory=dict)
    shown: tuple[str, ...] = ()
    bonds: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Flow:
        """Return what `to_json` gave."""
        fields = _with_tuples(value)
        calls = tuple(UnitCall(**call) for call in fields.pop("calls"))
        return cls(calls=calls, **fields)

    def tells(self, unit: str) -> bool:
        """Tell whether the first stage, where it runs a unit, tells the others what it returns beside the numbers in tensors."""
        return unit in self.told or unit in self.offered

    @property
    def num_first(self) -> int:
        """Calls that belong to the first stage, since code between units reads values of theirs [count]."""
        return 1 + max(self.firsts.values(), default=-1)

    def without_state(self, module: nn.Module) -> set[str]:
        """Return the units that have no parameters and buffers, and take tensors of other units for their sizes alone.

        What they give is every stage's: a table of anchors or positions, a mask.
        """
        taking = {call.unit for call in self.calls if call.takes} - {*self.of_numbers, *self.draws_python}
        held = {name: module.get_submodule(name) for name in taking}
        return {name for name, unit in held.items() if not [*unit.parameters(), *unit.buffers()]}

    def reasons(self, module: nn.Module) -> list[str]:
        """Return what a plan says of it: what the first stage tells the others, and what it cannot."""
        found: list[str] = []
        if self.firsts:
            read = "; ".join([*self.firsts][:2])
            found.append(f"code between the layers reads values, which the first stage tells the others: {read}")
        if self.shown:
            found.append(
                f"code between the layers makes texts of tensors ({'; '.join(self.shown[:2])}): only the stage that computes one "
                "has its numbers in the text"
            )
        around = [child for _, child in modules_around(module, self.units)]
        place = find_object_identity(users_class(type(child)) for child in around)
        if place is not None:
            found.append(
                f"code between the layers compares two objects by `is` ({place}): where a layer or a function gives back its "
                "very argument, a pipeline makes another tensor of it"
            )
        return found

    def is_better_than(self, finer: Flow, num_stages: int) -> bool:
        """Tell whether the same forward in smaller units has obstacles that this one has not, or reads inside of its units.

        Args:
            finer: The forward with one of the units opened.
            num_stages: Stages to cut it into [count].
        """
        mine, theirs = ({*flow.reads, *flow.leaks, *flow.shared} for flow in (self, finer))
        reads_more = bool(finer.firsts.keys() - self.firsts.keys())
        return bool(theirs - mine) or (reads_more and len(self.calls) >= num_stages)

    def refuse(self) -> None:
        """Raise if the forward cannot be cut into stages.

        Raises:
            ApplyError: Code between the units reads values, or tensors leave units in ways that cannot be followed.
        """
        if self.reads:
            raise ApplyError(
                f"the forward reads values between its layers: {'; '.join(self.reads[:3])}; every stage would need them before "
                "they are computed",
                fix="let the inputs alone decide, or move the code into a layer; or use pp=1",
            )
        if self.leaks:
            raise ApplyError(
                f"a tensor leaves its layer otherwise than as a result: {'; '.join(self.leaks[:3])}; other stages would "
                "not have it",
                fix="return it from the layer, or keep it as an attribute of a module that only that layer writes; or use pp=1",
            )
        if self.shared:
            raise ApplyError(
                f"{'; '.join(self.shared[:3])}: each stage runs only its own layers, and would see other values",
                fix="return it from that layer with its result, or keep it where that layer alone uses it; or use pp=1",
            )


def _with_tuples(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def modules_around(module: nn.Module, units: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules that are no part of a unit: their code runs on every stage."""
    inside = {id(child) for name in units for child in module.get_submodule(name).modules()}
    return [(name, child) for name, child in module.named_modules() if id(child) not in inside]


def call_costs(module: nn.Module, flow: Flow) -> list[float]:
    """Return the cost of each call in a step [FLOPs]; a parameter counts at its first use."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    counted: set[str] = set()
    costs = []
    for call in flow.calls:
        fresh = [name for name in call.parameters if name not in counted]
        counted.update(fresh)
        uncounted = 0
        if not call.flops:  # recurrences, for one: a product with each matrix
            own = [p for p in module.get_submodule(call.unit).parameters() if p.dim() > 1]
            is_table = isinstance(module.get_submodule(call.unit), (nn.Embedding, nn.EmbeddingBag))
            uncounted = 0 if is_table else sum(2 * math.prod(p.shape) for p in own)
        costs.append(work_of(call.flops + uncounted, sum(sizes[name] for name in fresh)))
    return costs
