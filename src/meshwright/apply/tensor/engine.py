"""Engine of tensor parallelism: a layout found at the first batch, and a data-parallel engine on the shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright.apply.data.base import make_copies_equal
from meshwright.apply.data.optimizer import acts_per_element, require_hooks
from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.apply.first_look import tell_everyone
from meshwright.apply.forecast import Forecast
from meshwright.apply.gradient_sums import GradientExit, sum_gradients, sum_term
from meshwright.apply.held_state import HeldPart, inside_blocks
from meshwright.apply.nested import OuterEngine
from meshwright.apply.norm import squares_of
from meshwright.apply.shards.facts import RunMoment, ShardFacts, join_parts
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.apply.state.buffers import holds_values, persistent_buffers
from meshwright.apply.tensor.cutting import Cutting, find_tensor
from meshwright.apply.tensor.expected_bytes import TensorForecast
from meshwright.apply.tensor.guards.part_guard import Guard
from meshwright.apply.tensor.masks import Mask, compare_masks
from meshwright.apply.tensor.matrices import WholeMatrices
from meshwright.apply.tensor.reasons import reasons_of
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.slices import Slices, make_whole
from meshwright.apply.tensor.tensor_layout import TensorLayout, is_readable
from meshwright.apply.tensor.whole import assign_values
from meshwright.apply.tensor.wishes import refuse_opaque, refuse_unknown
from meshwright.comm.communicator import Communicator
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.errors import ApplyError, CorruptionError
from meshwright.garbage import cheap_collection
from meshwright.nn.shards import gather_full
from meshwright.ranks.allocator import memory_kept
from meshwright.spec import Plan

__all__: list[str] = []

T = TypeVar("T")


class TensorEngine(OuterEngine):
    """Ranks that share each layer, and data parallelism over several such groups.

    Nothing is cut before the first batch, since the search for a layout needs a run. From then on `inner`, an engine of data
    parallelism, works on the smaller module, and this one adds the exchange between shards.

    Args:
        module: The user's module, on `device`.
        group: The data-parallel ranks: those with the same shards.
        tp_group: The ranks that share each layer.
        everyone: All ranks.
        device: This rank's device.
        make_inner: Gives the engine of data parallelism, once the module is cut.
        zero: What that engine will shard over the data-parallel ranks, for what is refused before it is made.
        wanted: FQN -> "whole", "column" or "row".
        on_slices: Whether layers run on slices of the sequence between their regions.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Communicator,
        tp_group: Communicator,
        everyone: Communicator,
        device: torch.device,
        *,
        make_inner: Callable[[], Engine],
        zero: int = 0,
        wanted: Mapping[str, str] | None = None,
        on_slices: bool = True,
    ) -> None:
        super().__init__(
            module,
            group,
            device,
            everyone,
            f"tp={tp_group.size} reads the model's data flow off its first batch, and none has come yet",
        )
        self.tp_group = tp_group
        self.cutting: Cutting | None = None
        self._make_inner = make_inner
        self._zero = zero
        self._wanted = dict(wanted or {})
        self._on_slices = on_slices
        self._optimizer: torch.optim.Optimizer | None = None
        self._keeps_whole_state = False
        self._hooks: list[Any] = []
        self._partial_hooks: list[Any] = []
        self._whole_matrices: WholeMatrices
        self._partial: list[nn.Parameter] = []
        self._cut_ids: set[int] = set()
        refuse_unknown(module, self._wanted)
        refuse_opaque(module, tp_group.size)
        make_copies_equal(self.parameters, everyone)
        make_copies_equal(module.buffers(), everyone)

    # -- the layout ---------------------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        return self.tp_group.size

    def prepare(self, run: Callable[[nn.Module], Any] | None) -> None:
        """Find the layout and cut the module, once."""
        if not self.is_prepared:
            self.cut(self.find_layout(run))

    def find_layout(self, run: Callable[[nn.Module], Any] | None) -> TensorLayout:
        """Return the layout. Every rank calls this; one that has a batch searches, and tells the others.

        Args:
            run: Runs a copy of the model and its loss on a small batch and returns the model's outputs; None where this
                rank has no sample.

        Raises:
            ApplyError: No rank has a batch, or nothing can be cut.
        """
        layout = TensorLayout.from_dict(tell_everyone(self._everyone, self.device, self.module, run, self._search))
        self._refuse_uncut(layout)
        return layout

    def _search(self, run: Callable[[nn.Module], Any]) -> dict[str, Any]:
        """Return the layout as JSON values; nothing else of the search survives, since it holds the whole parameters."""
        with cheap_collection(), memory_kept(), no_cached_tensors(self.module):
            search = Search(self.module, self.tp_group.size, run, self._wanted, self._everyone.timeout_s)
            return search.layout(on_slices=self._on_slices).to_dict()

    def detail(self, plan: Plan) -> Plan:
        """Return the plan with the layout and the reasons for it."""
        if self.cutting is None:
            return plan
        plan = self.inner.detail(plan)
        layout = self.cutting.layout
        kinds = {name: cut.kind for name, (_, cut) in layout.cuts.items()}
        by_id = self.cutting.layouts_by_id()
        sizes = {
            name: by_id[id(parameter)][0].full_numel if id(parameter) in by_id else parameter.numel()
            for name, parameter in self.module.named_parameters()
        }
        reasons = reasons_of(layout, sizes, self.tp_group.size, self.cutting.parts)
        return plan.replace(layouts=kinds | dict.fromkeys(layout.whole, "whole"), reasons=(*plan.reasons, *reasons))

    def _refuse_uncut(self, layout: TensorLayout) -> None:
        if layout.regions:
            return
        reasons = "; ".join(f"{name}: {why}" for name, why in list(layout.whole.items())[:3])
        raise ApplyError(
            f"tp={self.tp_group.size} has nothing to cut: no layer of this model gives the same numbers in "
            f"{self.tp_group.size} shards ({reasons})",
            fix=f"use the plan 'dp={self._everyone.size}'",
        )

    def cut(self, layout: TensorLayout) -> None:
        """Cut the module, and make the engine for the shards."""
        self.cutting = Cutting(self.module, layout, self.tp_group, make_guard=Guard)
        self._refuse_misplaced(self.cutting.misplaced)
        if self._optimizer is not None and acts_per_element(self._optimizer):
            self.cutting.share_state(self._optimizer)
        self._whole_matrices = WholeMatrices(self.cutting)
        self._cut_ids = {id(find_tensor(self.module, name)) for name in layout.cuts}
        named = dict(self.module.named_parameters(remove_duplicate=False))
        self._partial = list({id(named[name]): named[name] for name in sorted(layout.partial)}.values())
        self._inner = self._make_inner()
        self._inner.adopt_optimizer(self._optimizer)
        self._hook_partial()

    def _refuse_misplaced(self, names: Sequence[str]) -> None:
        told = zip(self._everyone.ranks, self._everyone.all_gather_json(list(names), device=self.device), strict=True)
        if found := [(rank, name) for rank, theirs in told for name in theirs]:
            rank, name = found[0]
            raise CorruptionError(
                f"the shards of '{name}', put together again on rank {rank}, are not the parameter that was cut "
                f"({len(found) - 1} more are wrong)",
                rank=rank,
                step=0,
                part=name,
                fix="run again; if it comes again, please report it: it is a bug of Meshwright",
            )

    def use_switch(self, switch: ShardSwitch) -> None:
        super().use_switch(switch)
        for part in () if self.cutting is None else self.cutting.parts:
            part.use_switch(switch)

    def held_parts(self, moment: RunMoment) -> list[tuple[Tensor, ShardFacts]]:
        return join_parts(super().held_parts(moment), [] if self.cutting is None else self.cutting.held_parts(moment))

    def gradient_terms(self) -> set[int]:
        return super().gradient_terms() | {id(parameter) for parameter in self._partial}

    def _hook_partial(self) -> None:
        for hook in self._partial_hooks:
            hook.remove()
        leave_in_backward = self.inner.gradients_leave is GradientExit.IN_BACKWARD
        wanted = [p for p in self._partial if p.requires_grad] if leave_in_backward else []
        self._partial_hooks = [p.register_hook(functools.partial(sum_term, self.tp_group)) for p in wanted]

    def refresh_trainable(self) -> None:
        self._hook_partial()
        super().refresh_trainable()

    def copies_of_state(self) -> list[tuple[Communicator, list[tuple[str, Tensor]]]]:
        cut = set() if self.cutting is None else set(self.cutting.layout.cuts)
        whole = [
            (name, p) for name, p in self.module.named_parameters() if id(p) not in self._cut_ids and holds_values(p)
        ]
        buffers = [(name, buffer) for name, buffer in persistent_buffers(self.module) if name not in cut]
        return [*super().copies_of_state(), (self.tp_group, [*whole, *buffers])]

    def held_state(self) -> list[HeldPart]:
        blocks = {} if self.cutting is None else self.cutting.own_blocks()
        return inside_blocks(super().held_state(), blocks, has_whole_state=self._keeps_whole_state)

    # -- the step -----------------------------------------------------------------------------------------------

    @property
    def exchanges_in_backward(self) -> bool:
        return True

    @property
    def deals_parameters_out(self) -> bool:
        return self._zero > 0

    def forecast(self) -> Forecast:
        return TensorForecast(
            self.module, self.tp_group.size, lambda: (self.cutting and self.cutting.layout, self.inner.forecast())
        )

    def gives_own(self, name: str) -> bool:
        return self.inner.gives_own(name) and (self.cutting is None or is_readable(name, self.cutting.layout))

    def own_value(self, tensor: Tensor) -> Tensor | None:
        return self.inner.own_value(tensor.local if isinstance(tensor, Slices) else tensor)

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and not acts_per_element(optimizer):
            if self._zero:
                raise ApplyError(
                    f"{type(optimizer).__name__} needs whole matrices, and zero={self._zero} with tp={self.tp_group.size} "
                    "cuts them twice",
                    fix="use zero=0, or tp=1, or an optimizer that treats each element by itself",
                )
            require_hooks(optimizer)
            self._hooks += [
                optimizer.register_step_pre_hook(lambda *_: self._whole_matrices.enter()),
                optimizer.register_step_post_hook(lambda *_: self._whole_matrices.leave()),
            ]
            self._keeps_whole_state = True
        self._optimizer = optimizer

    def begin_step(self) -> None:
        if self.cutting is not None:
            self.cutting.forget(self.device)
            self.cutting.begin_step()
        self.inner.begin_step()

    def finish_step(self) -> None:
        self._whole_matrices.end()
        self.inner.finish_step()

    def begin_forward(self) -> None:
        if self.cutting is not None:
            self.cutting.begin_step()
        self.inner.begin_forward()

    def streams(self) -> Any:
        """Return the slicing of the streams after a forward, for `set_streams`."""
        return None if self.cutting is None else self.cutting.streams()

    def set_streams(self, streams: Any) -> None:
        """Restore what `streams` returned: other micro-batches ran forwards in between, and backward may recompute."""
        if self.cutting is not None:
            self.cutting.set_streams(streams)

    @property
    def forward_groups(self) -> list[Communicator]:
        return [self.tp_group, *self.inner.forward_groups]

    def forward_backward(self, batch: Any, compute: Callable[[nn.Module, Any], T]) -> list[T]:
        if self.cutting is not None:
            self.cutting.forget(self.device)
        return self.inner.forward_backward(batch, compute)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.prepare(lambda module: module(*args, **kwargs))
        if self.cutting is not None:
            self.cutting.begin_step()
        with self.switch.user_code():
            return make_whole(self.inner.forward(args, kwargs))

    def own_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.cutting is not None:
            self.cutting.forget(self.device)
            self.cutting.begin_step()
        with self.switch.user_code():
            return make_whole(self.inner.own_forward(args, kwargs))

    def finish_gradients(self, scale: float) -> None:
        leave = self.inner.gradients_leave
        if leave is GradientExit.AT_END:
            sum_gradients(self._partial, self.tp_group)
        self.inner.finish_gradients(scale)
        if leave is GradientExit.NEVER:  # as late as can be: the exchange over dp may have begun in backward
            sum_gradients(self._partial, self.tp_group)

    def gradient_squares(self, skipped: frozenset[int], *, exact: bool) -> Tensor:
        """Return the sum of the whole gradient's squares: shards are summed, and what every rank holds counts once."""
        pieces = [(gradient, id(p)) for gradient, p in self.inner.gradient_pieces() if id(p) not in skipped]
        whole = [gradient for gradient, key in pieces if key not in self._cut_ids]
        cut = [gradient for gradient, key in pieces if key in self._cut_ids]
        squares = torch.stack([squares_of(whole, self.device, exact=exact), squares_of(cut, self.device, exact=exact)])
        self.inner.sum_over_pieces(squares)
        if self.tp_group.group_rank > 0:
            squares[0] = 0.0  # counted by the first rank: other ranks may have summed it in another order
        self.tp_group.all_reduce(squares)
        return squares.sum()

    def begin_inspection(self, number: int) -> str | None:
        parts = [] if self.cutting is None else self.cutting.parts
        if not parts:
            return None
        # All of them at first, when the layout is new; then in turn.
        chosen = parts if number == 0 else [parts[number % len(parts)]]
        for part in chosen:
            part.is_inspected = True
        return chosen[0].name

    def end_inspection(self) -> Sequence[Finding]:
        found: list[Finding] = []
        masks: list[Mask] = []
        for part in [] if self.cutting is None else self.cutting.parts:
            found += part.findings
            masks += part.masks
            part.findings, part.masks, part.is_inspected = [], [], False
        return [*found, *compare_masks(self.tp_group, masks, self.device)]

    # -- whole values -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Make the module whole and plain inside the context: parameters, buffers and forward. Writes stay."""
        if self.cutting is None:
            yield
            return
        cutting = self.cutting
        with self.inner.whole_parameters(), cutting.suspended(), self.switch.suspended():
            tensors = {name: find_tensor(self.module, name) for name in cutting.layouts}
            kept = {name: tensor.data for name, tensor in tensors.items()}
            for name, own in cutting.layouts.items():
                assign_values(tensors[name], gather_full(kept[name], own, self.tp_group))
            whole: dict[str, Tensor] = {}
            try:
                yield
                whole = {name: tensor.data for name, tensor in tensors.items()}
            finally:
                for name, tensor in tensors.items():
                    assign_values(tensor, kept[name])
            cutting.take_writes(kept, whole)

    def full_gradients(self) -> dict[str, Tensor | None]:
        found = self.inner.full_gradients()
        if self.cutting is None:
            return found
        by_id = self.cutting.layouts_by_id()
        empty = [
            name
            for name, parameter in self.module.named_parameters()
            if not all(layout.numel for layout in by_id.get(id(parameter), ()))
        ]
        if empty:  # a rank without entries of a parameter may not know that it has a gradient
            own = [name for name in empty if found.get(name) is not None]
            told = {name for names in self.tp_group.all_gather_json(own, device=self.device) for name in names}
            found |= {name: self.module.get_parameter(name).data for name in told - {*own}}
        for name, parameter in self.module.named_parameters():
            gradient = found.get(name)
            layouts = by_id.get(id(parameter))
            # Already whole during the step of an optimizer that needs whole matrices.
            if gradient is not None and layouts is not None and not self._whole_matrices.are_whole:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                found[name] = gather_full(dense, layouts, self.tp_group)
        return found

    def close(self) -> None:
        for hook in (*self._hooks, *self._partial_hooks):
            hook.remove()
        if self._inner is not None:
            self._inner.close()
        if self.cutting is not None:
            self.cutting.close()
            self.cutting.fill_with_nan()
            self.cutting = None
