"""Unit of sharded memory: parameters of one dtype and device in one flat tensor, and the pieces for the optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn

from meshwright._torch_private import foreach_add_, foreach_mul_
from meshwright.apply.data.buckets import dense_stride
from meshwright.apply.data.flat import FlatLayout, Span
from meshwright.apply.data.sharding import Sharding
from meshwright.apply.shards.classes import known_facts
from meshwright.comm.communicator import Pending
from meshwright.comm.compression.reducer import Exchange, GradientSet, GradientSpec, Reducer
from meshwright.errors import ApplyError

__all__: list[str] = []

WRITE_WHOLE = "change parameters before apply_plan, or inside `with model.whole_parameters():` on every rank"


@dataclasses.dataclass(slots=True)
class Piece:
    """The slice of one parameter's memory, or all of it, that this rank's optimizer updates."""

    span: Span
    tensor: nn.Parameter
    """[span.numel], or the parameter's own shape where it is never cut. Its memory is the unit's segment."""


class FlatUnit:
    """Parameters of one dtype and device, in flat memory whose segments belong to the ranks of a group.

    A unit either keeps its values whole, and the segment is a view of them (ZeRO 1 and 2). Or it keeps this rank's segment only
    and is gathered when needed (`is_gathered`, ZeRO 3).

    Gradients stay in autograd's memory until the ranks sum them; then each rank keeps those of its segment. With
    `keeps_gradients` (ZeRO 1) the sums overwrite this rank's part of the whole gradients, which live until the next step.
    Otherwise the sums accumulate in a segment of their own, and the whole gradients are freed.

    Args:
        named_parameters: (FQN, parameter) pairs, in registration order; all of one dtype and device.
        sharding: Settings of ZeRO, with the ranks that share the memory. With `offload` the optimizer works on a copy of the
            segment in the host's memory, and gradients are copied there.
        within: Sums gradients over these ranks.
        keep_whole: Whether no parameter may be cut.
        is_gathered: Whether values are whole only while needed.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        sharding: Sharding,
        within: Reducer,
        *,
        keep_whole: bool,
        is_gathered: bool,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.group = group = sharding.shard_group
        self.is_gathered = is_gathered
        self.keeps_gradients = sharding.zero == 1
        self.offload = sharding.offload
        self._within = within
        self.layout = FlatLayout([p.numel() for p in self.parameters], group.size, keep_whole=keep_whole)
        self._strides = [dense_stride(parameter) for parameter in self.parameters]
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._specs = [self._spec(index) for index in self.layout.order]
        spans = self.layout.spans(group.group_rank)
        self._piece_specs = [self._spec(span.index, span.start, span.stop) for span in spans]
        self.flat: torch.Tensor | None = None
        """[layout.numel], all ranks' values; None while only the segment is here."""
        self.gradient: torch.Tensor | None = None
        """[segment_numel], this rank's sums of this step; None before there are any, and with `keeps_gradients`."""
        self._whole_gradients: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self.recast: str | None = None
        """A parameter whose gradient came in another dtype than its own was when the plan was applied."""
        self.may_move = self.is_trainable
        """Whether it is trainable, or was: an own loop's zeros in `.grad` let the optimizer move it after it was frozen."""
        self._settling: Exchange | None = None
        self._coming: tuple[torch.Tensor, Pending] | None = None
        self._stamps: list[tuple[int, int]] = []
        self.expect([True] * len(self.parameters))
        self._take_over(keep_whole=keep_whole)

    def _take_over(self, *, keep_whole: bool) -> None:
        like = self.parameters[0]
        flat = torch.zeros(self.layout.numel, dtype=like.dtype, device=like.device)
        self._placeholder = torch.full((), _not_a_value(like.dtype), dtype=like.dtype, device=like.device)
        for index, parameter in enumerate(self.parameters):
            view = self._view(flat, index)
            view.copy_(parameter.detach())
            parameter.data = view
        self.flat = flat
        begin = self.group.group_rank * self.layout.segment_numel
        self.segment = flat[begin : begin + self.layout.segment_numel]  # [segment_numel], this rank's values
        if self.is_gathered:
            self.segment = self.segment.clone()
            self.release()
        self.master = self.segment.to("cpu", copy=True) if self.offload else self.segment
        """[segment_numel], the values that the optimizer updates."""
        self.pieces = [self._piece(span, keep_whole=keep_whole) for span in self.layout.spans(self.group.group_rank)]
        self._ends = self.layout.ends()

    def _spec(self, index: int, start: int = 0, stop: int | None = None) -> GradientSpec:
        return GradientSpec.of(self.names[index], self.parameters[index], start, stop)

    def _view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        return flat.as_strided(self._shapes[index], self._strides[index], self.layout.offsets[index])

    def _piece(self, span: Span, *, keep_whole: bool) -> Piece:
        values = self.master[span.offset : span.offset + span.numel]
        if keep_whole:
            values = values.as_strided(self._shapes[span.index], self._strides[span.index])
        return Piece(span, nn.Parameter(values, requires_grad=self.parameters[span.index].requires_grad))

    def cut(self, value: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the entries of a piece from what belongs to its whole parameter, in the optimizer's memory.

        Args:
            value: Of the parameter's shape; anything else, such as a count of steps, is copied.
            piece: The piece.
        """
        span = piece.span
        if value.shape != self._shapes[span.index]:
            return value.clone()
        flat = torch.empty(value.numel(), dtype=value.dtype, device=piece.tensor.device)  # in the order of the memory
        flat.as_strided(self._shapes[span.index], self._strides[span.index]).copy_(value)
        return flat[span.start : span.stop].clone().view_as(piece.tensor)

    def memory_format(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a parameter's shape and its strides in the unit's memory."""
        return tuple(self._shapes[index]), tuple(self._strides[index])

    def find_recast(self) -> str | None:
        """Return a parameter whose gradient has another dtype than the unit, or None."""
        dtype = self.segment.dtype
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if (grad := parameter.grad) is not None and grad.dtype != dtype:
                return name
        return self.recast

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters gets a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def is_whole(self) -> bool:
        """Whether all values are on this rank."""
        return self.flat is not None

    # -- values -------------------------------------------------------------------------------------------------

    def start_gather(self, *, async_op: bool = True) -> None:
        """Start gathering the values into fresh memory, before `gather`. All ranks of the group call it together."""
        if self.flat is None and self._coming is None:
            self.refuse_lost_writes()
            flat = torch.empty(self.layout.numel, dtype=self.segment.dtype, device=self.segment.device)
            self._coming = flat, self.group.all_gather_into(flat, self.segment.detach(), async_op=async_op)

    def gather(self) -> None:
        """Gather the values unless they are whole. All ranks of the group call it together."""
        self.start_gather(async_op=False)
        if self._coming is None:
            return
        flat, pending = self._coming
        pending.wait()
        self.flat, self._coming = flat, None
        for index, parameter in enumerate(self.parameters):
            parameter.data = self._view(flat, index)
        self._stamps = self._read_stamps()

    def written_name(self, *, by_value: bool) -> str | None:
        """Return the name of a parameter that code wrote into since it was gathered, and a release would lose; or None.

        Args:
            by_value: Whether to compare values, too: a write through `.data` shows in nothing else.
        """
        if self.flat is None or not self.is_gathered:
            return None
        name = self._find_stamped_anew()
        if name is not None or not by_value:
            return name
        own = self.flat.narrow(0, self.group.group_rank * self.layout.segment_numel, self.layout.segment_numel)
        is_same = torch.equal(own.view(torch.uint8), self.segment.detach().view(torch.uint8))
        return None if is_same else self.names[0]

    def _read_stamps(self) -> list[tuple[int, int]]:
        """Return what a write in place changes of each parameter, and an assignment to its `.data`."""
        return [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]

    def _find_stamped_anew(self) -> str | None:
        pairs = zip(self.names, self._stamps, self._read_stamps(), strict=True)
        return next((name for name, before, now in pairs if before != now), None)

    def release(self) -> None:
        """Free everything but this rank's segment. The parameters then read as NaN, of the right shape and without memory."""
        if self._coming is not None:
            self._coming[1].wait()
        self.flat = self._coming = None
        for parameter, shape in zip(self.parameters, self._shapes, strict=True):
            parameter.data = self._placeholder.expand(shape)
        self._stamps = self._read_stamps()

    def refuse_lost_writes(self) -> None:
        """Raise ApplyError if a script wrote into parameters without values: the next gather would overwrite it."""
        kept = self._placeholder
        if not self.is_gathered or self.flat is not None or self._coming is not None:
            return
        is_spoiled = kept.device.type == "cpu" and kept.is_floating_point() and not math.isnan(kept.item())
        if not is_spoiled and self._stamps == self._read_stamps():
            return
        name = self._find_stamped_anew() or self.names[0]
        raise ApplyError(
            f"'{name}', or another parameter of its layer, was written over while this rank holds only a part of its values: "
            "what was written would be lost",
            fix=WRITE_WHOLE,
        )

    def keep_changes(self) -> None:
        """Copy what was written into gathered values back into this rank's segment. All ranks call it together."""
        if self.flat is not None and self.is_gathered:
            self._take_over_moved(self.flat)
            begin = self.group.group_rank * self.layout.segment_numel
            own = self.flat[begin : begin + self.layout.segment_numel]
            is_written = torch.tensor([not torch.equal(own, self.segment)], dtype=torch.int32, device=own.device)
            # On every rank or on none, since sentinels compare the ranks' states.
            self.group.all_reduce(is_written, "max")
            if is_written.item():
                with torch.no_grad():
                    self.segment.copy_(own)
                    self.master.copy_(self.segment)
            self._stamps = self._read_stamps()

    def _take_over_moved(self, flat: torch.Tensor) -> None:
        """Copy values that a script has assigned to `.data` into the unit's memory."""
        for index, parameter in enumerate(self.parameters):
            view = self._view(flat, index)
            if parameter.data_ptr() != view.data_ptr():
                if parameter.shape != view.shape:
                    raise ApplyError(
                        f"'{self.names[index]}' was given values of shape {list(parameter.shape)}, and has {list(view.shape)}",
                        fix="give it values of its own shape",
                    )
                view.copy_(parameter.data)
                parameter.data = view

    def take_writes(self) -> None:
        """With `offload`, copy what was written into the values since the optimizer's last step to the host."""
        if not self.offload or self.is_gathered or self.segment.data_ptr() == self.master.data_ptr():
            return
        here = self.segment if self.segment.device == self.master.device else self.segment.to("cpu")
        if not torch.equal(here, self.master):
            with torch.no_grad():
                self.master.copy_(here)

    def spread(self) -> None:
        """Give every rank the updated values of all segments, after the optimizer's step."""
        if self.offload:
            self.segment.copy_(self.master)
        if self.flat is not None and not self.is_gathered:
            self.group.all_gather_into(self.flat, self.segment.detach())

    # -- gradients ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Drop the gradients."""
        self.gradient = None
        self._whole_gradients = []
        self._sums = []
        for parameter in self.parameters:
            parameter.grad = None
        for piece in self.pieces:
            piece.tensor.grad = None

    def drop_cleared_gradients(self) -> None:
        """Drop the pieces' gradients of parameters whose `.grad` a script has set to None since the last exchange."""
        for piece in self.pieces:
            facts = known_facts(self.parameters[piece.span.index])
            if facts is not None and facts.cleared_in == facts.moment.steps:
                piece.tensor.grad = None

    @property
    def is_ready(self) -> bool:
        """Whether every parameter with an expected gradient has one."""
        return all(parameter.grad is not None for parameter in self._expected)

    def expect(self, used: Sequence[bool]) -> None:
        """Set which parameters are expected to get gradients: those that got one in the step before."""
        self._expected = [p for p, is_used in zip(self.parameters, used, strict=True) if is_used and p.requires_grad]

    def reduce(self) -> None:
        """Sum autograd's gradients over the ranks; missing ones count as zeros. All ranks call it together."""
        present = [self.parameters[index].grad is not None for index in self.layout.order]
        whole = [self._in_memory_order(index) for index in self.layout.order]
        factor = 2 if whole[0].is_complex() else 1
        gradients = GradientSet(self._specs, _real(whole), present)
        self._within.reduce_slices(gradients, [end * factor for end in self._ends])
        by_index = dict(zip(self.layout.order, whole, strict=True))
        sums = [by_index[piece.span.index][piece.span.start : piece.span.stop] for piece in self.pieces]
        for parameter in self.parameters:
            parameter.grad = None
        if self.keeps_gradients:
            self._whole_gradients, self._sums = whole, sums
            return
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.segment)
            self._sums = [self.gradient[piece.span.offset :][: piece.span.numel] for piece in self.pieces]
        if sums:
            foreach_add_(self._sums, sums)

    def _in_memory_order(self, index: int) -> torch.Tensor:
        """Return a parameter's gradient as [numel], in the memory order of its values; zeros where it has none."""
        grad, numel = self.parameters[index].grad, self.layout.numels[index]
        if grad is None:
            return torch.zeros(numel, dtype=self.segment.dtype, device=self.segment.device)
        grad = grad.detach()
        if grad.dtype != self.segment.dtype:
            self.recast = self.names[index]  # refused once all ranks know; until then all must exchange the same
            grad = grad.to(self.segment.dtype)
        if grad.stride() != tuple(self._strides[index]) and numel > 0:
            ordered = grad.new_empty(numel).as_strided(self._shapes[index], self._strides[index])
            grad = ordered.copy_(grad)
        return grad.as_strided((numel,), (1,))

    def start_settling(self, used: Sequence[bool], across: Reducer) -> None:
        """Start summing over the replicas of the group.

        Args:
            used: For each parameter, whether any rank had a gradient.
            across: Sums over the ranks that hold the same segment.
        """
        present = [used[piece.span.index] for piece in self.pieces]
        self._settling = Exchange(across.all_reduce(GradientSet(self._piece_specs, _real(self._sums), present)))

    def settle(self, used: Sequence[bool], scale: float) -> None:
        """Finish that sum, scale it, and give each piece its gradient; None where no rank used it.

        Args:
            used: For each parameter, whether any rank had a gradient.
            scale: Factor of the sums.
        """
        self.expect(used)
        if self._settling is not None:
            self._settling.finish()
            self._settling = None
        if self._sums and scale != 1.0:
            foreach_mul_(self._sums, scale)
        for piece, part in zip(self.pieces, self._sums, strict=True) if self._sums else ():
            if used[piece.span.index]:
                there = part.to("cpu", copy=True) if self.offload else part
                piece.tensor.grad = there.as_strided(piece.tensor.shape, piece.tensor.stride())

    def has_gradient(self, index: int) -> bool:
        """Tell whether any rank had a gradient for a parameter in the last step; its sums are with the pieces."""
        parameter = self.parameters[index]
        return bool(self._whole_gradients or self.gradient is not None) and any(p is parameter for p in self._expected)

    def held_gradients(self) -> list[torch.Tensor]:
        """Return the tensors that hold gradients between steps."""
        return self._whole_gradients if self.gradient is None else [*self._whole_gradients, self.gradient]

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return every parameter's whole gradient by FQN, after `settle`. All ranks of the group call it together."""
        mine = torch.zeros_like(self.segment)
        present = torch.zeros(len(self.parameters), dtype=torch.float32, device=mine.device)
        for piece in self.pieces:
            if piece.tensor.grad is not None:
                part = mine[piece.span.offset : piece.span.offset + piece.span.numel]
                part.as_strided(piece.tensor.shape, piece.tensor.stride()).copy_(piece.tensor.grad)
                present[piece.span.index] = 1
        flat = mine.new_empty(self.layout.numel)
        self.group.all_gather_into(flat, mine)
        self.group.all_reduce(present)
        return {
            name: self._view(flat, index).clone() if present[index] else None for index, name in enumerate(self.names)
        }


def _real(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor for tensor in tensors]


def _not_a_value(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
