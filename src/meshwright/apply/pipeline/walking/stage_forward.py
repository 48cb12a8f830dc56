"""Walk of one stage: the user's whole forward of one micro-batch, in which other stages' layers are skipped.

Every stage runs the whole forward on the same inputs. A *unit* is a module whose calls are assigned to stages; the user's code
between units is *glue*. A call of another stage's unit is skipped and returns stand-ins. Glue runs on the latest stage that
computes one of its tensors; tensors that depend on the inputs alone (masks, positions) are computed by every stage. A tensor
of another stage is received where this stage uses it, and a tensor of this stage is sent where another one uses it. All stages
see the same calls in the same order, so sender and receiver agree without a message.

Therefore these need no code of their own: masks, keyword arguments, skip connections over several stages, tensors in dataclasses,
shapes that change between micro-batches, and branches that the inputs decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import FakeTensor, PlainCheckpoints, current_function_mode, without_function_modes
from meshwright.apply.pipeline.p2p import Mail
from meshwright.apply.pipeline.tracing.functions import (
    DIFFERENTIATES,
    METADATA,
    RANDOM,
    is_of_packs,
    may_draw,
    refuse_gradient,
    writes_to,
)
from meshwright.apply.pipeline.tracing.reads import may_read, read_tensors
from meshwright.apply.pipeline.tracing.scene import (
    DEEP,
    containers_of_call,
    places_of_call,
    plain_tensors,
    substitute,
    substitute_call,
    tensors_of_call,
)
from meshwright.apply.pipeline.tracing.stage_map import StageMap, latest_of
from meshwright.apply.pipeline.walking.argument_checks import is_check, is_valid
from meshwright.apply.pipeline.walking.bookkeeping import Bookkeeping
from meshwright.apply.pipeline.walking.draws import Draws
from meshwright.apply.pipeline.walking.inside_functions import refuse_inside_function
from meshwright.apply.pipeline.walking.later_writes import LaterWrites
from meshwright.apply.pipeline.walking.path_hash import Way
from meshwright.apply.pipeline.walking.plain_facts import facts_in, sizes_in
from meshwright.apply.pipeline.walking.remembered import Known, encode_results
from meshwright.apply.pipeline.walking.shapes import Shapes
from meshwright.apply.pipeline.walking.stand_ins import (
    Meta,
    StageValue,
    mark,
    replace_tensors,
    value_of,
    values_in,
)
from meshwright.apply.pipeline.walking.told_results import from_bytes, to_bytes
from meshwright.apply.pipeline.walking.without_numbers import ReadsValueError, run_plain, zeros_like_meta
from meshwright.apply.pipeline.walking.written import (
    is_state,
    map_results,
    places_of_slots,
    refuse_unseen,
    versions_of,
    written_tensors,
)
from meshwright.apply.randomness.passed_over import as_often_as_counted, pass_over_call, pass_over_draw
from meshwright.apply.randomness.row_choices import note_elsewhere
from meshwright.apply.recompute.checkpointing import checkpoint_inside
from meshwright.python_state import PythonState
from meshwright.trees import tensors_in

__all__: list[str] = []

_NO_CALL: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})


class StageForward(Bookkeeping):
    """A walk: one stage's forward of one micro-batch, which runs inside this context."""

    def __init__(
        self,
        stage: int,
        stage_map: StageMap,
        known: tuple[Shapes, LaterWrites],
        mail: Mail,
        draws: Draws,
        *,
        module: nn.Module,
        way: Way,
    ) -> None:
        super().__init__(stage, mail, module)
        self.outputs: Any = None
        """The model's outputs, once it has returned; the loss is computed after that."""
        self._stage_map = stage_map
        self._shapes, self._later_writes = known
        self._draws = draws
        self._way = way
        self._calls: dict[str, int] = {}
        self._has_graph = torch.is_grad_enabled()
        self._checkpoints = 0  # depth of the user's own torch.utils.checkpoint around the running code
        self._plain_checkpoints = PlainCheckpoints(lambda: not self.is_paused, self._note_checkpoint)

    def __enter__(self) -> StageForward:
        self._plain_checkpoints.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._plain_checkpoints.__exit__()
        if error[0] is None or issubclass(error[0], ReadsValueError):
            self._follow_state()

    def close(self) -> None:
        """Hold nothing of the forward any more."""
        super().close()
        self.outputs = None
        del self._plain_checkpoints  # which calls methods of this

    def _note_checkpoint(self, enters: bool) -> None:
        # The user's checkpoint would repeat calls of several stages; each unit of this stage is checkpointed by itself.
        self._checkpoints += 1 if enters else -1

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """Run a user's hook inside the context; it may run on one rank only."""
        self._way.in_hook += 1
        try:
            yield
        finally:
            self._way.in_hook -= 1

    # -- units --------------------------------------------------------------------------------------------------

    def call_unit(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one call of a unit on its stage, or return stand-ins for it on the others."""
        refuse_inside_function(name, has_graph=self._has_graph)
        with without_function_modes():  # what is done here with tensors is not the user's code
            taken = self._stage_map.flow.takes.get(name)
            given = None if taken else plain_tensors(args, kwargs)
            is_plain = given is not None
            places: list[Any] = []
            if given is None:
                places, given = self._look_into(name, args, kwargs)
            self._later_writes.refuse_written(given)
            values = self._values_of(given)
            stage = self._place_of_call(name, module, values)
            self._way.call(self._stage_map.numbers[name], stage, values)
            if self._draws.python:
                self._way.draw(*PythonState().places)
            known = None
            if stage != self.stage:
                pass_over_call(name, self._calls[name] - 1, list(tensors_in((args, kwargs))))
                self._send_all(values, stage)
                known = None if taken else self._shapes.of_unit(name, module, args, kwargs)
                if known is not None and known.is_plain:
                    return self._repeat_unit(name, known, stage, (args, kwargs), is_plain=is_plain)
            elif values:
                if [value for value in values if value.stand_in is not None]:
                    for value in values:
                        self.real(value)  # in the order in which they are sent
                    substitute(places, self._real_if_known)
                    args, kwargs = substitute_call(args, kwargs, self._real_if_known)
                    given = [self._real_if_known(tensor) for tensor in given]
                if [value for value in values if value.sent_to]:
                    self._mail.flush()  # the layer may write over it
            if stage == self.stage and not is_plain:
                given += tensors_of_call(args, kwargs, places_of_call(args, kwargs))
            versions = versions_of(given) if stage == self.stage else []
        if stage == self.stage:
            with as_often_as_counted(name, self._calls[name] - 1), self._later_writes.call(name):
                outputs = self._run_unit(module, forward, args, kwargs)
            with without_function_modes():
                outputs = self._take_results(name, outputs, given, versions, None if is_plain else (args, kwargs))
            return self._with_numbers_noted(name, outputs, _NO_CALL if is_plain else (args, kwargs))
        if known is None:
            with self.paused():
                known = self._shapes.find_of_unit(name, module, forward, args, kwargs)
        return self._repeat_unit(name, known, stage, (args, kwargs), is_plain=is_plain)

    def _look_into(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[Any, Any]], list[Tensor]]:
        """Return the places that a call can write into, and the tensors among its arguments and in those places."""
        places = places_of_call(args, kwargs, opens=name in self._stage_map.flow.opens)
        taken = self._stage_map.flow.takes.get(name)
        if taken:
            places = [*places, *places_of_slots(self._module, taken)]
        return places, tensors_of_call(args, kwargs, places)

    def _run_unit(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self.paused(), self._draws.inside_layer():
            if self._checkpoints and torch.is_grad_enabled():
                return checkpoint_inside(forward, module, args, kwargs)
            return forward(module, *args, **kwargs)

    def _take_results(
        self,
        name: str,
        outputs: Any,
        given: list[Tensor],
        versions: list[int],
        call: tuple[tuple[Any, ...], dict[str, Any]] | None,
    ) -> Any:
        """Mark the results of a call on this stage, and the tensors that it wrote elsewhere, as this stage's; return the results.

        Args:
            name: The unit.
            outputs: Its results.
            given: Its tensor arguments.
            versions: Their versions before the call.
            call: Its arguments, where there is more than tensors in them.
        """
        now = versions_of(given)
        if now != versions:
            for tensor, old_version, version in zip(given, versions, now, strict=True):
                if version != old_version:
                    self._note_written(tensor, self.stage, by_layer=True)
        if self._is_told(name, self.stage):
            self._tell(to_bytes(encode_results(outputs)), self._stage_map.num_stages, self._draws.device)
        old = {id(tensor) for tensor in given}
        leaves = self._stage_map.flow.leaves.get(name, ())
        places = [] if call is None else places_of_call(*call)
        if places or leaves:
            for tensor in written_tensors(places, self._module, leaves):
                known = value_of(tensor)
                if id(tensor) not in old and (known is None or known.owner is not self):
                    self._mark_own(tensor)
        if isinstance(outputs, Tensor):
            return self._mark_result(outputs, old)
        held = {id(place) for _, place in places}
        return map_results(outputs, lambda tensor: self._mark_result(tensor, old), held)

    def _repeat_unit(
        self, name: str, known: Known, stage: int, call: tuple[tuple[Any, ...], dict[str, Any]], *, is_plain: bool
    ) -> Any:
        """Return stand-ins for the results of a call that another stage runs, and repeat its writes."""
        if self._is_told(name, stage):
            with without_function_modes():
                known = from_bytes(self._tell(None, self._stage_map.num_stages, self._draws.device), known)
        written = _NO_CALL if is_plain else call
        if known.is_plain:
            return self._with_numbers_noted(name, self._stand_in(known, stage), written)
        with without_function_modes():
            given: list[Tensor] = []
            if known.writes or known.effects:
                given = tensors_of_call(*call, places_of_call(*call, depth=DEEP))
            for place, meta in known.writes:
                self._write_remote(given[place], meta, stage, by_layer=True)
        if known.effects:
            refuse_unseen(name, known.effects, self._stage_map.flow.leaves.get(name, ()))
        return self._with_numbers_noted(name, self._stand_in(known, stage, given, call), written)

    def _is_told(self, name: str, stage: int) -> bool:
        """Tell whether a layer's stage tells the others what it returns, beside the numbers in tensors."""
        return stage == 0 and self._stage_map.flow.tells(name)

    def _with_numbers_noted(
        self, name: str, outputs: Any, call: tuple[tuple[Any, ...], dict[str, Any]] = _NO_CALL
    ) -> Any:
        """Make what a call returned part of the path, and what it may have written into its arguments and attributes."""
        flow, parts = self._stage_map.flow, self._stage_map.parts
        written = [getattr(self._module.get_submodule(of), slot, None) for of, slot in flow.leaves.get(name, ())]
        written += containers_of_call(*call) if name in self._stage_map.may_look else ()
        found = [outputs, *written] if written else outputs
        facts = facts_in(found) + self._later_writes.facts(name)
        self._way.result(sizes_in(found, outputs), facts, looks=name in flow.looks, in_parts=name in parts)
        return outputs

    def _mark_result(self, tensor: Tensor, given: set[int]) -> Tensor:
        """Mark a layer's result; an existing tensor (an input, a buffer) is marked through a view of it."""
        if tensor.grad_fn is None or id(tensor) in given or value_of(tensor) is not None:
            is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
            tensor = tensor.view_as(tensor) if is_plain else tensor
        return self._mark_own(tensor)

    def _place_of_call(self, name: str, module: nn.Module, values: list[StageValue]) -> int:
        """Return the stage of a unit's next call, which takes these values."""
        before = self._calls.get(name, 0)
        self._calls[name] = before + 1
        return self._stage_map.place_of_call(name, before, module, [value.home for value in values])

    def end_model(self, outputs: Any) -> None:
        """Record the model's outputs; the loss comes next."""
        self.outputs = outputs
        if self._draws.python:
            self._way.draw(*PythonState().places)
        self._way.is_over = True

    @property
    def owes_nothing_to_the_loss(self) -> bool:
        """Whether the model is done and other stages alone have its outputs, so that the loss cannot need this one."""
        if self.outputs is None or self._stage_map.flow.has_loss_beside:
            return False
        homes = [value.home for value in values_in(self.outputs)]
        return bool(homes) and self.stage not in homes and None not in homes

    # -- glue ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or func in METADATA:
            return func(*args, **kwargs)
        if is_check(func):
            return is_valid(func, *args, **kwargs)
        if not (self._way.is_over or self._way.in_hook):
            self._later_writes.refuse_written((args, kwargs))
        values = self._own_values(args, kwargs)
        if not values:
            return func(*args, **kwargs) if func not in RANDOM else self._draws.call(func, args, kwargs)
        if is_of_packs(func) and not self._own_values(args[1:], kwargs):
            sizes = func(zeros_like_meta(Meta.of(values[0].any)), *args[1:], **kwargs)[1]
            return self._run(func, args, kwargs, values)[0], sizes  # the sizes are every stage's
        return self._run(func, args, kwargs, values)

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: Any) -> Any:
        home = latest_of([value.home for value in values])
        self._way.between(home, values)
        if func in DIFFERENTIATES:
            refuse_gradient(func, args, kwargs)
        target = writes_to(func, args, kwargs)
        is_read = may_read(func, values) and not (
            self._way.is_over or self._way.in_hook
        )  # those may run on one stage only
        read = self._send_read(read_tensors(func, args, kwargs), self._stage_map.num_stages) if is_read else []
        if home == self.stage or (home is None and not [value for value in values if value.real is None]):
            given: Any = (args, kwargs)
            for value in read:
                self.real(value)  # in the order in which they are sent
            if [value for value in values if value.stand_in is not None]:
                given = replace_tensors(given, self._real_if_known)
            return self._run_here(func, given[0], given[1], home, target)
        if home is not None:
            self._send_all(values, home)
        if may_draw(func, args, kwargs):
            pass_over_draw(list(tensors_in((args, kwargs))))  # the stage that runs it numbers it
        if target is not None:
            if home is None and is_state(target, self._module):
                for value in values:
                    self.real(value)  # refuses what no stage sends: the write would be lost
            return self._write_elsewhere(func, target, values, home)
        if read:
            found = run_plain(func, *self._with_read((args, kwargs), read))
            return self._stand_in(Known(replace_tensors(found, Meta.of)), home)
        result = self._stand_in(self._shapes.of_function(func, args, kwargs, home), home)
        note_elsewhere(func, args, kwargs, result)
        return result

    def _run_here(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], home: int | None, target: Any
    ) -> Any:
        if target is None:
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                if args and result is args[0] and result.layout == torch.strided:
                    result = result.view_as(result)  # `.to()` that has nothing to do: two tensors to all other stages
                return mark(result, StageValue(self, home, result, None))
            return replace_tensors(result, lambda tensor: mark(tensor, StageValue(self, home, tensor, None)))
        known = value_of(target)
        if known is not None and known.sent_to:
            self._mail.flush()
        result = func(*args, **kwargs)
        self._note_written(target, home)
        return target if isinstance(result, Tensor) else result

    def _write_elsewhere(
        self, func: Callable[..., Any], target: Tensor, values: list[StageValue], home: int | None
    ) -> Any:
        value = value_of(target)
        template = Meta.of(target if value is None or value.owner is not self else value.any)
        needs_grad = torch.is_grad_enabled() and any(
            known.any.requires_grad for known in values if known.real is not None or known.stand_in is not None
        )
        meta = Meta(template.shape, template.stride, template.dtype, template.device, needs_grad)
        self._write_remote(target, meta, home)
        return None if getattr(func, "__name__", "") in ("__setitem__", "__set__") else target


def is_own(tensor: Tensor) -> bool:
    """Tell whether the stage whose forward is under way computes a tensor, to one that stands inside of that forward.

    What comes of the inputs alone every stage computes: it counts on the first.
    """
    walk = current_function_mode()
    if isinstance(walk, StageForward):
        value = value_of(tensor)
        home = 0 if value is None or value.owner is not walk or value.home is None else value.home
        return home == walk.stage
    return not isinstance(tensor, FakeTensor)  # inside a layer of another stage, of which only the shapes are found
