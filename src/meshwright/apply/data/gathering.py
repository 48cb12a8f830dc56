"""Gathering of ZeRO units when they are needed, and summing of their gradients, in one order on all ranks.

Each rank's data decides which units it needs, and when: a branch, a loop, an empty share. The exchanges must not depend on
that, or ranks would wait for each other forever. So all ranks follow one *exchange order* in each pass over the model:

    forward    gather unit 0, gather unit 1, ...
    backward   gather the last unit, the one before, sum the last one's gradients, ...

A rank that needs a unit runs the order up to it. A rank that does not need it runs its entry at the end of the pass, or when it
needs a later unit. The first forward follows the order of registration. The first backward follows the order in which the first
rank with samples ran its forward. From the second step on, all ranks follow what that rank did in the first step.

A unit is needed when its module is called, or when one of its parameters is looked up (a tied head, a weight that another
module multiplies by). In backward it is needed when autograd unpacks a tensor saved from it. Where a rank needs a released
unit again, the ranks agree on that at the end of the phase: see `requests.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright._torch_dispatch import is_transformed, is_wrapped, without_transforms
from meshwright._torch_private import without_dispatch_modes, without_function_modes
from meshwright.apply.data.exchange_order import GATHER, REDUCE, Action, Uses, backward_order, complete, forward_order
from meshwright.apply.data.flat_unit import FlatUnit
from meshwright.apply.data.lookup_hooks import WatchedParameters
from meshwright.apply.data.own_gathering import OwnGathering
from meshwright.apply.data.requests import agree_on_unit, spare_bytes
from meshwright.apply.data.saved_view import SavedView
from meshwright.apply.data.sharding import Sharding
from meshwright.apply.modules.hooks import OwnHook
from meshwright.apply.modules.transforms import BESIDE_ZERO_3, derivatives_refused, refusal
from meshwright.apply.state.assigned import names_data
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.trees import tensors_in

__all__: list[str] = []


class Gathering(OwnGathering):
    """Gathers and sums of the units of a module, pass by pass.

    Args:
        module: The user's module.
        units: All units, those that are always whole too.
        owners: The module that each unit's parameters belong to.
        group: The data-parallel ranks, which follow one order.
        device: The device of small exchanges.
        sharding: Whether to prefetch, and when the gradients of units that are always whole are summed.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[FlatUnit],
        owners: Sequence[nn.Module],
        group: Communicator,
        device: torch.device,
        *,
        sharding: Sharding,
    ) -> None:
        self._reduce_bytes, self._ready_bytes = sharding.reduce_bytes, 0
        self._module, self._names_data = module, names_data(module)
        self._units = list(units)
        self._group = group
        self._prefetches = sharding.prefetches and not group.shares_memory_of(device)
        self._gathered = {index for index, unit in enumerate(units) if unit.is_gathered}
        self._trainable = {index for index, unit in enumerate(units) if unit.is_trainable}
        self._order: list[Action] = []
        self._place, self._phase = 0, "none"
        self._everything_whole = False
        self._at_address: dict[int, int] = {}
        self._seen: list[list[bool]] = [[False] * len(unit.parameters) for unit in units]
        self._missing = [0] * len(units)
        # Learned in the first step, then the same on all ranks.
        self._is_learning = True
        self._keeps_all = self._gathered_bytes() <= spare_bytes(group, device)
        self._events: dict[str, list[Action]] = {"forward": [], "backward": []}
        """What this rank did in each phase of the first step, in its order."""
        self._is_over: set[int] = set()
        self._keeps_now = False
        """Whether this forward deviates from the exchange order: then nothing is released before its end."""
        self.keeps_until_end: set[int] = set()
        """Units that are needed again after their module's forward: they stay whole until the pass is over."""
        order = range(len(self._units))
        self._orders = {
            "forward": forward_order(self._gathered),
            "backward": backward_order(order, self._gathered, self._trainable),
        }
        self._uses = Uses()
        self._backward_is_guessed = bool(self._gathered)
        """Whether no forward has run yet that shows the order in which backward needs the units."""
        self._hooks: list[Any] = []
        self._dicts: list[tuple[nn.Module, dict[str, Any]]] = []
        self._watch(owners)

    def _gathered_bytes(self) -> int:
        return sum(self._units[index].layout.numel * self._units[index].segment.itemsize for index in self._gathered)

    # -- detection of needed units -------------------------------------------------------------------------------

    def _watch(self, owners: Sequence[nn.Module]) -> None:
        unit_of = {id(p): index for index in self._gathered for p in self._units[index].parameters}
        self._units_of: dict[int, set[int]] = {}
        for child in self._module.modules():
            needed = {name: unit_of[id(p)] for name, p in child._parameters.items() if id(p) in unit_of}
            if needed:
                self._units_of[id(child)] = set(needed.values())  # the owner may be a module around it
                self._dicts.append((child, child._parameters))
                child._parameters = WatchedParameters(
                    child._parameters, needed, self.need, self._need_all, self._refuse_copy
                )
        by_owner: dict[int, tuple[nn.Module, list[int]]] = {}
        for index in sorted(self._gathered):
            by_owner.setdefault(id(owners[index]), (owners[index], []))[1].append(index)
        for owner, indices in by_owner.values():
            self._units_of.setdefault(id(owner), set()).update(indices)
            self._hooks.append(owner.register_forward_pre_hook(OwnHook(self._before(indices))))
            self._hooks.append(owner.register_forward_hook(OwnHook(self._after(indices))))
        for index in sorted(self._trainable - self._gathered):
            for parameter in self._units[index].parameters:
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient(index)))

    def _before(self, indices: Sequence[int]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._phase == "none" and not self._everything_whole:
                raise ApplyError(
                    f"the module of '{self._units[indices[0]].names[0]}' was called outside of a step, with only a shard here",
                    fix="call the model that apply_plan returned, on every rank",
                )
            for index in indices:
                self.need(index)

        return hook

    def _after(self, indices: Sequence[int]) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, outputs: Any) -> None:
            if self._phase != "forward" or self._everything_whole:
                return
            self._is_over.update(indices)
            if (self._is_learning and self._keeps_all) or is_transformed():  # whose tensors have no memory to compare
                return
            for index in indices:
                if index not in self.keeps_until_end and not self._keeps_now and not self._aliases(index, outputs):
                    self._let_go(index)

        return hook

    def _aliases(self, index: int, outputs: Any) -> bool:
        """Tell whether an output is a view of the unit's memory, which may be read after the unit's release."""
        return any(self._at_address.get(tensor.untyped_storage().data_ptr()) == index for tensor in tensors_in(outputs))

    def _refuse_copy(self) -> None:
        if not self._everything_whole:
            raise ApplyError(
                "a copy of the module would hold no values: under ZeRO-3 a rank has only its shards",
                fix="copy it inside `with model.whole_parameters():`, which every rank enters",
            )

    def _need_all(self, indices: Sequence[int]) -> None:
        """Gather all units of a module whose parameters are iterated in a forward, as for a penalty in the loss."""
        if self._phase == "forward":
            for index in indices:
                self.need(index)

    def _on_gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._note((REDUCE, index))
                # Each sum waits for the slowest rank's backward, so many small sums would add up those waits.
                self._ready_bytes += sum(parameter.nbytes for parameter in self._units[index].parameters)
                if self._ready_bytes >= self._reduce_bytes:
                    self._ready_bytes = 0
                    self._sum_what_is_ready()

        return hook

    @contextlib.contextmanager
    def watching_saved_tensors(self) -> Iterator[None]:
        """Have autograd save positions instead of values of gathered units, so that their memory is free between the passes."""
        if not self._gathered:
            yield
            return
        with derivatives_refused(*BESIDE_ZERO_3), saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided or tensor._is_zerotensor():  # derivatives of zero, without memory
            return tensor
        if is_wrapped(tensor):
            raise refusal(*BESIDE_ZERO_3)
        index = self._at_address.get(tensor.untyped_storage().data_ptr())
        return tensor if index is None else SavedView.of(tensor, index)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self.need(index := packed.index)
        flat = self._units[index].flat
        if flat is None:
            raise ApplyError(
                f"the values of '{self._units[index].names[0]}' were needed in a backward outside of step() and "
                "model.backward(), which gather them",
                fix="call model.backward(loss) in place of loss.backward(); gradients of inputs by torch.autograd.grad (a "
                "penalty, adversarial examples) need a plan with zero=2 at most",
            )
        return packed.in_memory(flat)

    def need(self, index: int) -> None:
        """Make the unit whole, if it is not."""
        if self._phase == "none":
            return
        self._note_need(index)
        if self._units[index].is_whole:
            return
        with without_transforms(), without_dispatch_modes(), without_function_modes():  # these reads are not a model's
            self._sum_what_is_ready()
            while not self._units[index].is_whole and self._place < len(self._order):
                self._run_next()
            if not self._units[index].is_whole:
                self._keeps_now = True
            while not self._units[index].is_whole:
                self._serve(agree_on_unit(self._group, index))
            self._fetch_next()

    def _serve(self, index: int | None) -> None:
        if index is not None:
            self.keeps_until_end.add(index)
            self._make_whole(index)

    def _end_phase(self) -> None:
        """Run the rest of the order, and then the gathers that other ranks request."""
        with without_function_modes():
            self._run_rest()
            while self._gathered and (wanted := agree_on_unit(self._group, None)) is not None:
                self._serve(wanted)
                self._let_all_go()

    def _fetch_next(self) -> None:
        """Start the next gather of the order while this rank computes.

        Over shared memory it would compete for the core that computes. While the order is being learned, a gather outside of it
        may come first.
        """
        if self._prefetches and not self._is_learning and self._place < len(self._order):
            kind, index = self._order[self._place]
            if kind == GATHER:
                self._units[index].start_gather()

    def need_layer(self, layer: nn.Module) -> None:
        """Make the units of a layer, and of the modules in it, whole."""
        for child in layer.modules():
            for index in sorted(self._units_of.get(id(child), ())):
                self.need(index)

    def _note_need(self, index: int) -> None:
        if self._phase == "forward" and index in self._is_over:
            self.keeps_until_end.add(index)
        if self._is_learning:
            self._uses.note(index)
            if self._phase == "backward" and (GATHER, index) not in self._events["backward"]:
                for done in sorted(self._trainable & self._gathered):
                    if self._units[done].is_ready:
                        self._note((REDUCE, done))
            self._note((GATHER, index))

    def _note(self, action: Action) -> None:
        if self._is_learning and self._phase != "none" and action not in self._events[self._phase]:
            self._events[self._phase].append(action)

    # -- running the order --------------------------------------------------------------------------------------

    def _run_next(self) -> None:
        kind, index = self._order[self._place]
        self._place += 1
        if kind == GATHER:
            self._make_whole(index)
        else:
            unit = self._units[index]
            seen = self._seen[index]
            for position, parameter in enumerate(unit.parameters):
                seen[position] = seen[position] or parameter.grad is not None
            was_ready = unit.is_ready
            if was_ready:
                self._note((REDUCE, index))
            unit.reduce()
            if was_ready:  # else its backward may not be over; the end of the pass releases it
                self._let_go(index)

    def _sum_what_is_ready(self) -> None:
        """Run the sums that come next in the order and have all their gradients."""
        while self._phase == "backward" and self._place < len(self._order):
            kind, index = self._order[self._place]
            if kind != REDUCE or not self._units[index].is_ready:
                return
            self._run_next()

    def _make_whole(self, index: int) -> None:
        if not (unit := self._units[index]).is_whole:
            unit.gather()
            if unit.flat is not None:
                self._at_address[unit.flat.data_ptr()] = index

    def _let_go(self, index: int) -> None:
        unit = self._units[index]
        if unit.is_gathered and unit.flat is not None and not self._everything_whole:
            del self._at_address[unit.flat.data_ptr()]
            written = unit.written_name(by_value=self._is_learning or self._names_data)
            unit.release()
            if written is not None:
                raise ApplyError(
                    f"'{written}', or another parameter of its layer, was written over in a forward: under ZeRO-3 a rank keeps "
                    "only its part of the values, and what was written would be lost",
                    fix="use zero=2; where the first batch sets it, run it once before apply_plan; or write inside "
                    "`with model.whole_parameters():` on every rank, between steps",
                )

    def _run_rest(self) -> None:
        while self._place < len(self._order):
            self._run_next()
            self._let_all_go()
        self._let_all_go()

    def _let_all_go(self) -> None:
        for index in self._gathered:
            self._let_go(index)

    # -- passes -------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a forward."""
        self._let_all_go()  # where the pass before ended in an error
        self._phase, self._order, self._place = "forward", self._orders["forward"], 0
        self._is_over, self._keeps_now, self._uses = set(), False, Uses()

    def begin_backward(self) -> None:
        """End the forward, where one is under way, and begin a backward."""
        if self._phase == "forward":
            self._end_phase()
        if self._backward_is_guessed:
            self._learn_backward()
        self._phase, self._order, self._place = "backward", self._orders["backward"], 0
        self._is_over, self._ready_bytes = set(), 0
        for index in self._trainable - self._gathered:
            self._missing[index] = sum(parameter.requires_grad for parameter in self._units[index].parameters)

    def end_pass(self) -> None:
        """End a micro-batch: run the entries that this rank did not need, a whole backward where it ran none."""
        if self._phase == "forward" and torch.is_grad_enabled():
            self.begin_backward()
        self._end_phase()
        self._phase = "none"

    def seen_gradients(self) -> list[list[bool]]:
        """Return, for each unit, which parameters have had a gradient in this step, and reset it."""
        seen, self._seen = self._seen, [[False] * len(unit.parameters) for unit in self._units]
        return seen

    def _learn_backward(self) -> None:
        """Take this forward's order for the first backward: a wrong order would gather the whole model."""
        everyone = self._group.all_gather_json(self._uses.in_order())
        uses = next((uses for uses in everyone if uses), None)
        if uses is not None:  # else no rank had a sample
            order = backward_order(uses, self._gathered, self._trainable)
            self._orders["backward"] = complete(order, self._gathered, self._trainable)
            self._backward_is_guessed = False

    def learn(self) -> None:
        """Make the first rank's first step (of those with samples) the order of all ranks. Every rank calls it."""
        if not self._is_learning or self._everything_whole:
            return
        everyone = self._group.all_gather_json(self._events)
        lead = next((events for events in everyone if any(events.values())), None)
        if lead is None:
            return  # no rank had a sample
        self._is_learning = self._backward_is_guessed = False
        for phase, events in lead.items():
            order = complete([(kind, index) for kind, index in events], self._gathered, self._trainable)
            self._orders[phase] = [action for action in order if phase == "backward" or action[0] == GATHER]

    def close(self) -> None:
        """Remove the hooks. Nothing is exchanged, since this rank may have failed alone; gathered units stay released."""
        for hook in self._hooks:
            hook.remove()
        for owner, plain in self._dicts:
            owner._parameters = plain
