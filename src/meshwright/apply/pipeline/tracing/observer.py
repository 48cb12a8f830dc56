"""Observer of one plain forward: the calls of units, and what passes between them beside arguments and results."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright._torch_private import RNN_LAYER, without_function_modes
from meshwright.apply.modules.transforms import refuse_foreign_call
from meshwright.apply.pipeline.tracing.call_trace import Flow, UnitCall
from meshwright.apply.pipeline.tracing.functions import (
    DIFFERENTIATES,
    METADATA,
    differentiated_by,
    gradient_refusal,
    is_of_packs,
    shown_name,
    writes_to,
)
from meshwright.apply.pipeline.tracing.may_look import units_that_may_draw
from meshwright.apply.pipeline.tracing.own_tables import OwnTables
from meshwright.apply.pipeline.tracing.reads import read_tensors
from meshwright.apply.pipeline.tracing.scene import Scene, holds_tensors, places_of_call, tensors_below, tensors_of_call
from meshwright.apply.pipeline.tracing.shared_state import SharedState
from meshwright.apply.pipeline.tracing.stage_map import latest_of
from meshwright.apply.pipeline.walking.argument_checks import is_check, is_valid
from meshwright.apply.pipeline.walking.stand_ins import (
    ATTRIBUTE,
    StageValue,
    UnitMark,
    mark,
    tensors_of,
    value_of,
    values_in,
)
from meshwright.apply.pipeline.walking.told_results import Judged, Lookers
from meshwright.apply.pipeline.walking.user_hooks import guard_hooks, release_hooks
from meshwright.apply.pipeline.walking.written import map_results
from meshwright.describe.flop_counter import make_flop_counter, recurrence_flops
from meshwright.errors import ApplyError
from meshwright.python_state import PythonState
from meshwright.trees import tensors_in

__all__: list[str] = []

_MADE = "_meshwright_made"  # attribute of a tensor that a unit has made: (observer, place of the call)
_GRAD_FN = inspect.getattr_static(Tensor, "grad_fn").__get__  # torch's counter of operations asks all results for it


class ForwardObserver(TorchFunctionMode):
    """An observed forward of the whole model; a tensor's home is the position of its call in the sequence."""

    def __init__(self, module: nn.Module, units: Sequence[str]) -> None:
        super().__init__()
        self.counter = make_flop_counter({RNN_LAYER.overloadpacket: recurrence_flops})
        self._module = module
        self._modules = dict(module.named_modules())
        self._units = list(units)
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._calls: list[dict[str, Any]] = []
        self._used: list[set[str]] = []
        self._reads: list[str] = []
        self._firsts: dict[str, int] = {}
        self._shown: list[str] = []
        self._leaks: list[str] = []
        self._leaves: dict[str, list[tuple[str, str]]] = {}
        self._takes: dict[str, list[tuple[str, str]]] = {}
        self._made_of: dict[int, set[str]] = {}
        self._alive: list[Any] = []
        self._marked: list[Tensor] = []
        self._running: int | None = None
        self._given: set[int] = set()
        self._in_objects: set[int] = set()
        self._opens = set[str]()
        self._lookers = Lookers()
        self._is_in_model = False
        self._draws = False
        self._draws_python: set[str] = set()
        self._random_state = torch.get_rng_state()
        self._python_state = PythonState()
        self._changed_buffers: dict[int, str] = {}
        self._of_outputs: set[int] | None = None
        self._has_loss_beside = False
        self._shared = SharedState(module, self._units)
        self._tables = OwnTables()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the calls of units inside the context."""
        handles: list[Any] = []
        units = {
            id(unit): (name, unit) for name in reversed(self._units) for unit in [self._module.get_submodule(name)]
        }
        for module in self._modules.values():
            guard_hooks(module, lambda: self)
        for name, unit in units.values():
            handles.append(unit.register_forward_pre_hook(self._before(name), with_kwargs=True, prepend=True))
            # First: a user's hook runs between the layers in a walk, and sees there what the layer gives.
            handles.append(unit.register_forward_hook(self._after, with_kwargs=True, prepend=True))
        handles.append(self._module.register_forward_pre_hook(self._enter_model))
        handles.append(self._module.register_forward_hook(self._leave_model, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            release_hooks(self._modules.values())

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """Run a user's hook inside the context: values that it reads decide nothing."""
        was_in_model, self._is_in_model = self._is_in_model, False
        try:
            yield
        finally:
            self._is_in_model = was_in_model

    def _note_draws(self) -> None:
        """Record whether random numbers were drawn since a unit returned."""
        self._draws = self._draws or not torch.equal(torch.get_rng_state(), self._random_state)
        self._note_python_draws("")

    def _note_python_draws(self, unit: str) -> None:
        if unit not in self._draws_python and self._python_state.has_moved():
            self._draws_python.add(unit)

    def _enter_model(self, *_: Any) -> None:
        self._is_in_model, self._of_outputs = True, None
        self._random_state = torch.get_rng_state()
        self._python_state = PythonState()

    def _leave_model(self, _module: nn.Module, _args: Any, outputs: Any) -> None:
        if self._is_in_model:
            self._note_draws()
        self._is_in_model, self._of_outputs = False, {id(tensor) for tensor in tensors_in(outputs)}

    def _before(self, name: str) -> Callable[..., None]:
        def hook(unit: nn.Module, args: Any, kwargs: Any) -> None:
            if self._running is not None:
                return
            self._note_draws()
            place = len(self._calls)
            parameters = list(unit.parameters())
            refuse_foreign_call(name, unit, self._names)
            own = {self._names[id(p)] for p in parameters}
            self._used.append(own | self._parameters_in((args, kwargs)))
            given = tensors_of_call(args, kwargs, places_of_call(args, kwargs))
            self._given = {id(tensor) for tensor in given}
            plain = {id(tensor) for tensor in tensors_of_call(args, kwargs, places_of_call(args, kwargs, opens=False))}
            self._in_objects = self._given - plain
            values = [value for tensor in given if (value := value_of(tensor)) is not None and value.owner is self]
            self._calls.append(
                {
                    "unit": name,
                    "takes": tuple(sorted({value.home for value in values if value.home is not None})),
                    "flops": self.counter.get_total_flops(),
                    "module": unit,
                    "scene": Scene(args, kwargs, self._modules.items()),
                    "elsewhere": self._shared.begin(name, unit),
                    "given": [(tensor, tensor._version) for tensor in given],
                    "buffers": [(b, b._version) for b in unit.buffers()],
                }
            )
            self._running = place
            self._python_state = PythonState()

        return hook

    def _after(self, unit: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        place = self._running
        if place is None or self._calls[place]["module"] is not unit:
            return None
        self._running = None
        call = self._calls[place]
        self._random_state = torch.get_rng_state()
        self._note_python_draws(call["unit"])
        self._python_state = PythonState()
        call["flops"] = self.counter.get_total_flops() - call["flops"]
        changes = self._note_left(call, place)
        self._shared.end(call["unit"], call.pop("elsewhere"))
        held = {id(b): version for b, version in call.pop("buffers")}
        self._changed_buffers |= {id(b): call["unit"] for b in unit.buffers() if held.get(id(b)) != b._version}
        with without_function_modes():
            written = [tensor for tensor, version in call["given"] if tensor._version != version]
            for tensor in written:
                self._mark(tensor, place)
            self._lookers.end(call["unit"], unit, args, kwargs, outputs, changes=changes + written)
            # A view of its own: a unit may return its very input.
            return map_results(outputs, lambda tensor: self._mark(tensor.view_as(tensor), place))

    def _note_left(self, call: dict[str, Any], place: int) -> list[Any]:
        """Record the tensors that a call has left in attributes and in its arguments; return all that it changed of these."""
        changes = list(call.pop("scene").changes())
        old = {id(tensor) for tensor, _ in call["given"]}
        for path, kind, key, value in changes:
            if kind == "del" or not holds_tensors(value):
                if isinstance(path[0], tuple):
                    self._shared.note(call["unit"], path, key)
                continue
            if isinstance(path[0], tuple):
                slot = (path[0][1], path[1] if len(path) > 1 else key)
                slots = self._leaves.setdefault(call["unit"], [])
                if slot not in slots:
                    slots.append(slot)
                self._tables.note_left(slot, tensors_below(value), looks=call["unit"] in self._lookers.units)
            for tensor in tensors_below(value):
                known = value_of(tensor)
                if id(tensor) not in old and (known is None or known.owner is not self):
                    self._mark(tensor, place)
        return changes

    def forget(self) -> None:
        """Take the marks off: a tensor that leads to itself by its mark, and lies in a graph, is never freed."""
        for tensor in self._marked:
            for name in (_MADE, ATTRIBUTE):
                vars(tensor).pop(name, None)
        self._marked, self._alive, self._calls, self._tables = [], [], [], OwnTables()
        self._lookers.forget()

    def _mark(self, tensor: Tensor, place: int | None) -> Tensor:
        self._marked.append(tensor)
        return mark(tensor, StageValue(self, place, tensor, None))

    def _parameters_in(self, tree: Any) -> set[str]:
        found: set[str] = set()
        for tensor in tensors_of(tree):
            if id(tensor) in self._names:
                found.add(self._names[id(tensor)])
            found.update(self._made_of.get(id(tensor), ()))
        return found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._running is None and func in DIFFERENTIATES:
            found = differentiated_by(func, args, kwargs)
            if not found or any(value is None or value.owner is not self for value in found):
                raise gradient_refusal(func)  # whether all is on one stage, is known once stages are
        if is_check(func):
            return is_valid(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if func in METADATA or func == _GRAD_FN:
            if func is Tensor.__repr__:
                self._note_shown(value_of(args[0]))
            return result
        names = self._parameters_in((args, kwargs))
        if self._running is not None:
            self._used[self._running] |= names
            self._lookers.watch(self._calls[self._running]["unit"], func, args, kwargs)
            target, of_values = writes_to(func, args, kwargs), (self._names, self._changed_buffers, self._given)
            self._watch_unit(self._running, (args, kwargs), result, target)
            self._tables.note_made(func, (args, kwargs), (result, target), of_values)
            return result
        self._watch_between(func, (args, kwargs))
        self._tables.note_used((args, kwargs))
        values = [value for value in values_in((args, kwargs)) if value.owner is self]
        home = latest_of(value.home for value in values)
        target = writes_to(func, args, kwargs)
        if self._of_outputs is not None:
            self._watch_loss(self._of_outputs, (args, kwargs), (result, target))
        if home is not None:
            self._used[home] |= names
            self._note_read(func, args, kwargs, result, home)
        are_sizes_known = is_of_packs(func) and not values_in((args[1:], kwargs))
        result_of_units = result[:1] if are_sizes_known else result
        for tensor in tensors_in((result_of_units, target)):
            self._alive.append(tensor)  # an id identifies a tensor only while the tensor lives
            if home is not None:
                self._mark(tensor, home)
            elif names and value_of(tensor) is None:
                self._made_of[id(tensor)] = names
        return result

    def _note_read(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, home: int
    ) -> None:
        """Record that code between units reads values of a tensor that a unit computes."""
        if not self._is_in_model:
            return
        needed = [value for t in read_tensors(func, args, kwargs) if (value := value_of(t)) and value.owner is self]
        home = (latest_of(value.home for value in needed) or 0) if needed else home
        text = f"{shown_name(func)} of a tensor of '{self._calls[home]['unit']}'"
        if needed:
            self._firsts[text] = max(home, self._firsts.get(text, home))
        elif isinstance(result, (bool, int, float, complex, list)) and not any(True for _ in tensors_in(result)):
            self._reads.append(text)

    def _note_shown(self, value: StageValue | None) -> None:
        """Record that code between units makes a text of a tensor that a unit computes."""
        is_between = self._is_in_model and self._running is None
        if is_between and value is not None and value.owner is self and value.home is not None:
            self._shown.append(f"__repr__() of a tensor of '{self._calls[value.home]['unit']}'")

    def _watch_loss(self, of_outputs: set[int], given: Any, results: Any) -> None:
        """Find tensors of units that the loss takes beside the model's outputs: an auxiliary loss left on a layer."""
        found = [(id(tensor) in of_outputs, value_of(tensor)) for tensor in tensors_in(given)]
        self._has_loss_beside |= any(not own and known and known.owner is self for own, known in found)
        of_outputs.update(id(tensor) for tensor in tensors_in(results))

    def _watch_unit(self, place: int, given: Any, result: Any, target: Any) -> None:
        """Find tensors of other calls that a unit uses without receiving them as arguments."""
        for tensor in tensors_in(given):
            known, made = value_of(tensor), getattr(tensor, _MADE, None)
            is_theirs = known is not None and known.owner is self and known.home != place
            if not is_theirs and (made is None or made.owner is not self or made.place == place):
                continue
            if id(tensor) in self._in_objects:
                self._opens.add(self._calls[place]["unit"])
            if (
                id(tensor) not in self._given
                and not (known is not None and known.owner is self and known.home == place)
                and all(tensor is not buffer for buffer in self._calls[place]["module"].buffers())
            ):
                self._note_taken(place, tensor)
        for tensor in tensors_in(result):
            # A parameter that comes back as it is (`.to()`) was not made here.
            if id(tensor) not in self._given and (target is not None or id(tensor) not in self._names):
                self._marked.append(tensor)
                setattr(tensor, _MADE, UnitMark(self, place))

    def _note_taken(self, place: int, tensor: Tensor) -> None:
        unit = self._calls[place]["unit"]
        for name, module in self._modules.items():
            for attribute, item in vars(module).items():
                if attribute.startswith("_") and attribute in ("_parameters", "_buffers", "_modules"):
                    continue
                if any(t is tensor for t in tensors_below(item)):
                    slots = self._takes.setdefault(unit, [])
                    if (name, attribute) not in slots:
                        slots.append((name, attribute))
                    return
        self._leaks.append(f"layer '{unit}' uses one of another layer that it is not given")

    def _watch_between(self, func: Callable[..., Any], given: Any) -> None:
        """Find tensors of units that reach the code between them otherwise than by results and attributes."""
        for tensor in tensors_in(given):
            known, made = value_of(tensor), getattr(tensor, _MADE, None)
            if made is not None and made.owner is self and (known is None or known.owner is not self):
                unit = self._calls[made.place]["unit"]
                self._leaks.append(f"{shown_name(func)} takes one that '{unit}' has made inside")
            if id(tensor) in self._changed_buffers and self._is_in_model:
                unit = self._changed_buffers[id(tensor)]
                self._leaks.append(f"{shown_name(func)} takes a buffer that '{unit}' has written")

    def flow(self, pieces: int, judged: Judged) -> Flow:
        """Return the trace, with the operations of so many times the samples.

        Args:
            pieces: How often the batch that was run stands for its samples [count].
            judged: What was found of units that look at values so far; it is extended.
        """
        if self._running is not None:
            raise ApplyError(f"'{self._calls[self._running]['unit']}' was called and did not return")
        calls = tuple(
            UnitCall(
                unit=call["unit"], flops=pieces * call["flops"], parameters=tuple(sorted(used)), takes=call["takes"]
            )
            for call, used in zip(self._calls, self._used, strict=True)
        )
        told = self._lookers.judge(self._module, judged)
        self._shared.note_for_some(judged.changes, judged.outside)
        self._reads += [f"what '{unit}' returns, of a kind that cannot be sent" for unit in self._lookers.unsent(told)]
        of_told = {f"a size or number that '{c.unit}' returns": i for i, c in enumerate(calls) if c.unit in told}
        idle = {
            name: tuple(self._names[id(p)] for p in self._module.get_submodule(name).parameters())
            for name in self._units
            if all(call.unit != name for call in calls)
        }
        own = self._tables.find(self._module, self._leaves, self._takes, self._units, self._shared)
        return Flow(
            calls=calls,
            units=tuple(self._units),
            idle=idle,
            draws=self._draws,
            reads=tuple(dict.fromkeys(self._reads)),
            firsts=self._firsts | of_told,
            shown=tuple(dict.fromkeys(self._shown)),
            draws_python=tuple(sorted(self._draws_python | units_that_may_draw(self._module, self._units))),
            leaves={unit: tuple(slot for slot in slots if slot not in own) for unit, slots in self._leaves.items()},
            own_tables=tuple(sorted(own)),
            **self._shared.watched(self._changed_buffers)._asdict(),
            takes={unit: tuple(slots) for unit, slots in self._takes.items()},
            opens=tuple(sorted(self._opens)),
            looks=tuple(sorted(self._lookers.units)),
            of_numbers=tuple(sorted(self._lookers.of_numbers)),
            told=tuple(sorted(told)),
            offered=tuple(sorted(self._lookers.offered)),
            has_loss_beside=self._has_loss_beside,
            counts=self._shared.units,
            leaks=tuple(dict.fromkeys(self._leaks)),
            shared=tuple(self._shared.texts()),
            bonds=self._shared.bonds(),
        )
