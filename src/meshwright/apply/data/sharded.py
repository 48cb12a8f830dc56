"""ZeRO and HSDP: optimizer state, gradients and parameters sharded over data-parallel ranks.

Rajbhandari et al. 2020, doi:10.1109/SC41405.2020.00024: stage 1 shards the optimizer's state, stage 2 also the gradients, stage 3
also the parameters. Parameters lie in units (`flat_unit.py`); a rank updates its own segment of each.

All exchanges inside a step follow one order, which no rank's own data decides. A rank with fewer micro-batches, or one that takes
another branch, contributes zeros. See `gathering.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.apply.data.base import DataParallelEngine
from meshwright.apply.data.expected_bytes import ShardsForecast
from meshwright.apply.data.flat_unit import FlatUnit
from meshwright.apply.data.gathering import Gathering
from meshwright.apply.data.held import held_parts, held_state, raise_recast
from meshwright.apply.data.optimizer import acts_per_element, hand_over_pieces, refuse_other_state, require_fresh
from meshwright.apply.data.own_gathering import released_on_error
from meshwright.apply.data.piece_groups import PieceGroups
from meshwright.apply.data.sharding import Sharding
from meshwright.apply.data.unit_parameters import cut_into_units
from meshwright.apply.forecast import Forecast
from meshwright.apply.gradient_sums import GradientExit
from meshwright.apply.held_state import HeldPart
from meshwright.apply.norm import values_of
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.apply.state.buffers import persistent_buffers
from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.choose import make_reducer
from meshwright.comm.compression.reducer import PlainReducer
from meshwright.errors import ApplyError

__all__: list[str] = []

T = TypeVar("T")


class ShardedEngine(DataParallelEngine):
    """Data parallelism with sharded state.

    Args:
        module: The user's module, on `device`.
        group: The data-parallel ranks: all that share a global batch.
        device: This rank's device.
        sharding: Settings of ZeRO, with the shard group and the replica group.
    """

    def __init__(self, module: nn.Module, group: Communicator, device: torch.device, sharding: Sharding) -> None:
        has_replicas = sharding.replica_group.size > 1
        reducer = make_reducer(sharding.compress, sharding.replica_group if has_replicas else sharding.shard_group)
        super().__init__(module, group, device, reducer)
        self.sharding = sharding
        self._within = PlainReducer(sharding.shard_group) if has_replicas else reducer
        self._across = reducer if has_replicas else PlainReducer(sharding.replica_group)
        self.units: list[FlatUnit] = []
        self._owners: list[nn.Module] = []
        self._gathering: Gathering | None = None
        self._keep_whole = False
        self._hooks: list[Any] = []
        self._groups = PieceGroups(sharding.zero)

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Cut the parameters into units that suit the optimizer, and replace its parameters by this rank's pieces.

        Raises:
            ApplyError: The optimizer already has state.
        """
        self._keep_whole = False
        if optimizer is not None:
            require_fresh(optimizer)
            self._keep_whole = not acts_per_element(optimizer)
        self._make_units(keep_whole=self._keep_whole)
        if optimizer is not None:
            hand_over_pieces(optimizer, self._held_pieces(), self.units)
            if isinstance(optimizer, torch.optim.Optimizer):
                self._hooks.append(optimizer.register_load_state_dict_post_hook(refuse_other_state))
        self._groups.note(optimizer)

    def _held_pieces(self) -> dict[int, list[nn.Parameter]]:
        held: dict[int, list[nn.Parameter]] = {id(p): [] for unit in self.units for p in unit.parameters}
        for unit in self.units:
            for piece in unit.pieces:
                held[id(unit.parameters[piece.span.index])].append(piece.tensor)
        return held

    @property
    def holds_parts(self) -> bool:
        return self.puts_aside

    @property
    def puts_aside(self) -> bool:
        return any(unit.is_gathered and not unit.is_whole for unit in self.units)

    def held_parts(self, moment: RunMoment) -> list[tuple[torch.Tensor, ShardFacts]]:
        return held_parts(self.units, f"zero={self.sharding.zero}", moment)

    @property
    def reads_as_nan(self) -> str:
        if not self.holds_parts:
            return ""
        return (
            "under ZeRO-3 a parameter that was put aside reads as NaN once its layer is over: a loss_fn has to look "
            "parameters up through the module each time, by module.parameters() for example, and not in a list or dict that it "
            "keeps; zero=2 leaves them whole"
        )

    def refuse_lost_writes(self) -> None:
        for unit in self.units:
            unit.refuse_lost_writes()

    @property
    def fixes_memory(self) -> bool:
        return True

    def accept_groups(self, optimizer: torch.optim.Optimizer) -> ApplyError | None:
        """Replace the whole parameters of added groups by this rank's pieces of them."""
        held = self._held_pieces()
        if not self._keep_whole and not acts_per_element(optimizer):
            return ApplyError(
                f"a group of {type(optimizer).__name__} that was added or changed needs whole matrices, and "
                f"zero={self.sharding.zero} has already cut them, as the first groups allowed",
                fix="give apply_plan an optimizer that has this group from the start",
            )
        return self._groups.accept(optimizer, held, self._sparse)

    def _make_units(self, *, keep_whole: bool) -> None:
        self.units, self._owners = cut_into_units(
            self.module, self.dense_parameters(), self.sharding, self._within, keep_whole=keep_whole
        )
        if self.sharding.zero > 1 and not self.sharding.per_step:
            self._gathering = Gathering(
                self.module, self.units, self._owners, self.group, self.device, sharding=self.sharding
            )

    def copies_of_state(self) -> list[tuple[Communicator, list[tuple[str, torch.Tensor]]]]:
        gathered = {id(parameter) for unit in self.units if unit.is_gathered for parameter in unit.parameters}
        whole = [(name, p) for name, p in self.module.named_parameters() if id(p) not in gathered]
        pieces: list[tuple[str, torch.Tensor]] = [
            (unit.names[piece.span.index], piece.tensor) for unit in self.units for piece in unit.pieces
        ]
        return [(self.group, [*whole, *persistent_buffers(self.module)]), (self.sharding.replica_group, pieces)]

    def held_state(self) -> list[HeldPart]:
        in_units = {id(parameter) for unit in self.units for parameter in unit.parameters}
        others = [part for part in super().held_state() if id(part.owner) not in in_units]
        return [*others, *held_state(self.units)]

    def take_held_state(self) -> None:
        for unit in self.units:
            unit.spread()

    # -- the step -----------------------------------------------------------------------------------------------

    @property
    def exchanges_in_backward(self) -> bool:
        return self._gathering is not None

    @property
    def needs_lockstep(self) -> bool:
        return self._gathering is not None

    @property
    def gradients_leave(self) -> GradientExit:
        return GradientExit.AT_END if self._gathering is None else GradientExit.IN_BACKWARD

    @property
    def deals_parameters_out(self) -> bool:
        return True

    def begin_step(self) -> None:
        super().begin_step()
        for unit in self.units:
            unit.take_writes()
            unit.begin_step()
        self._gather_for_step()

    def _gather_for_step(self) -> None:
        if self.sharding.per_step:
            for unit in self.units:
                unit.gather()

    def _release_after_step(self) -> None:
        if self.sharding.per_step:
            for unit in self.units:
                if unit.is_gathered:
                    unit.release()

    def refresh_trainable(self) -> None:
        super().refresh_trainable()
        for unit in self.units:
            unit.expect([True] * len(unit.parameters))
            unit.may_move |= unit.is_trainable
            for piece in unit.pieces:
                piece.tensor.requires_grad_(unit.parameters[piece.span.index].requires_grad)

    def begin_forward(self) -> None:
        self._gather_for_step()
        if self._gathering is not None:
            self._gathering.begin_forward()

    def end_forward(self) -> None:
        self._release_after_step()
        if self._gathering is not None:
            self._gathering.leave_forward()

    def forward_backward(self, batch: Any, compute: Callable[[nn.Module, Any], T]) -> list[T]:
        if self._gathering is None:
            return super().forward_backward(batch, compute)
        with self._gathering.watching_saved_tensors(), released_on_error(self._gathering):
            self._gathering.begin_forward()
            results = self._gathering.as_views(super().forward_backward(batch, compute))
            self._gathering.end_pass()
        return results

    def idle_pass(self) -> None:
        if self._gathering is not None:
            self._gathering.begin_forward()
            self._gathering.end_pass()

    def end_failed_pass(self) -> None:
        if self._gathering is not None:
            self._gathering.end_pass()

    def before_layer(self, layer: nn.Module) -> None:
        if self._gathering is not None:
            self._gathering.need_layer(layer)

    def begin_backward(self) -> None:
        if self._gathering is not None:
            self._gathering.begin_backward()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._gathering is None:
            return super().forward(args, kwargs)
        # Only its outputs count, and it leaves no gradients. Under ZeRO-3 every rank calls it.
        with torch.no_grad(), released_on_error(self._gathering):
            self._gathering.begin_forward()
            outputs = self._gathering.as_views(super().forward(args, kwargs))
            self._gathering.end_pass()
        return outputs

    def own_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._gathering is None:
            return super().own_forward(args, kwargs)
        with self._gathering.watching_saved_tensors(), released_on_error(self._gathering):
            self._gathering.begin_forward()
            outputs = self._gathering.as_views(self.module(*args, **kwargs))
            self._gathering.end_forward()
        return outputs

    def gradient_holders(self) -> Sequence[torch.Tensor]:
        return [*(piece.tensor for unit in self.units for piece in unit.pieces), *self._sparse]

    def drop_cleared_gradients(self) -> None:
        for unit in self.units:
            unit.drop_cleared_gradients()

    def begin_own_backward(self, *, is_alone: bool) -> None:
        super().begin_own_backward(is_alone=is_alone)
        if self._gathering is not None:
            self._gathering.begin_own_backward(is_alone=is_alone)

    def end_own_backward(self) -> None:
        if self._gathering is not None:
            self._gathering.end_own_backward()

    def end_own_exchange(self) -> None:
        if self._gathering is not None:
            self._gathering.end_own_exchange()

    def finish_gradients(self, scale: float) -> None:
        used = self._take_census()
        if self._gathering is None:
            for unit in self.units:
                if unit.is_trainable:
                    unit.reduce()
            self._release_after_step()
        trainable = [(unit, own) for unit, own in self._with_flags(used) if unit.is_trainable]
        for unit, own in trainable:
            unit.start_settling(own, self._across)
        for unit, own in trainable:
            unit.settle(own, scale)
        self.sum_sparse_gradients(scale)

    def _with_flags(self, flags: Sequence[bool]) -> list[tuple[FlatUnit, list[bool]]]:
        """Return each unit with its parameters' flags from `_take_census`."""
        rest = iter(flags)
        return [(unit, [next(rest) for _ in unit.parameters]) for unit in self.units]

    def _take_census(self) -> list[bool]:
        """Return, for each parameter of each unit, whether any rank has a gradient for it in this step."""
        present = [[p.grad is not None for p in unit.parameters] for unit in self.units]
        late = keeps = [False] * len(self.units)
        gathering = self._gathering
        if gathering is not None:
            # Gradients that arrived after their unit's sum: reentrant checkpointing, or a weight used late.
            late = [any(flags) for flags in present]
            keeps = [index in gathering.keeps_until_end for index in range(len(self.units))]
            seen = gathering.seen_gradients()
            present = [[a or b for a, b in zip(*pair, strict=True)] for pair in zip(present, seen, strict=True)]
        flags = [flag for unit in present for flag in unit]
        recast = next((name for unit in self.units if (name := unit.find_recast()) is not None), None)
        census = torch.tensor([*flags, *late, *keeps, recast is not None], dtype=torch.float32, device=self.device)
        self.group.all_reduce(census)
        *found, is_recast = [count > 0 for count in census.tolist()]
        if is_recast:
            raise_recast(self.group, self.device, self.sharding.zero, recast)
        if gathering is not None:
            for unit, is_late in zip(self.units, found[len(flags) :], strict=False):
                if is_late:
                    unit.reduce()
            for index, is_kept in enumerate(found[len(flags) + len(self.units) :]):
                if is_kept:
                    gathering.keeps_until_end.add(index)
            gathering.learn()
        return found[: len(flags)]

    def gradient_tensors(self) -> Sequence[torch.Tensor]:
        return self._piece_gradients() + self.sparse_values()

    def _piece_gradients(self) -> list[torch.Tensor]:
        gradients = [piece.tensor.grad for unit in self.units for piece in unit.pieces]
        return [gradient for gradient in gradients if gradient is not None]

    def gradient_pieces(self) -> list[tuple[torch.Tensor, nn.Parameter]]:
        pieces = [(p.tensor.grad, unit.parameters[p.span.index]) for unit in self.units for p in unit.pieces]
        found = [(grad, parameter) for grad, parameter in pieces if grad is not None]
        if self.sharding.shard_group.group_rank == 0:
            found += [(values_of(p.grad), p) for p in self._sparse if p.grad is not None]
        return found

    def sum_over_pieces(self, values: torch.Tensor) -> None:
        self.sharding.shard_group.all_reduce(values)

    def gradient_norm(self) -> torch.Tensor:
        return self.norm_of_squares()

    def finish_step(self) -> None:
        for unit in self.units:
            if unit.may_move:
                unit.spread()

    # -- whole values -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        if self._gathering is not None:
            with self._gathering.everything_whole():
                yield
            return
        self._gather_for_step()
        try:
            yield
        finally:
            self._release_after_step()

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        found: dict[str, torch.Tensor | None] = {}
        for unit in self.units:
            found.update(unit.full_gradients())
        named = self.module.named_parameters()
        return {name: found.get(name, parameter.grad) for name, parameter in named}

    def forecast(self) -> Forecast:
        return ShardsForecast(self.module, self.group.size, self.sharding, self.reducer, self.memory_bytes)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters that are "whole" and trainable, and of those that are "gathered" when needed."""
        sizes = {"whole": 0, "gathered": 0}
        for unit in self.units:
            if unit.is_gathered or unit.is_trainable:
                sizes["gathered" if unit.is_gathered else "whole"] += sum(p.nbytes for p in unit.parameters)
        return sizes

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        held = super().held_tensors()
        for unit in self.units:
            held["parameters"] += [unit.segment, unit.master]
            held["gradients"] += unit.held_gradients()
        return held

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._gathering is not None:
            self._gathering.close()
