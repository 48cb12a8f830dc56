"""Bookkeeping of one stage's forward: the stage that computes each tensor, and the tensors sent and received."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from meshwright._torch_private import current_function_mode, without_view
from meshwright.apply.pipeline.p2p import Mail
from meshwright.apply.pipeline.tracing.memory import Memory
from meshwright.apply.pipeline.tracing.scene import tensors_below
from meshwright.apply.pipeline.tracing.stage_map import latest_of
from meshwright.apply.pipeline.walking.remembered import Known
from meshwright.apply.pipeline.walking.stand_ins import (
    Meta,
    OtherParameterError,
    StageValue,
    StandIn,
    StrayValueError,
    mark,
    replace_tensors,
    value_of,
    values_in,
)
from meshwright.apply.pipeline.walking.without_numbers import zeros_like_meta
from meshwright.apply.tensor.slices import make_whole
from meshwright.trees import arguments_in

__all__: list[str] = []

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has: tables of parameters, buffers, children and hooks."""


class _Arrival(torch.autograd.Function):
    """Turns a leaf into a tensor that is neither leaf nor view, without a copy."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, data: Tensor) -> Tensor:  # noqa: ARG004 - autograd goes through it
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - torch's signature
        return gradients[0], None


def with_leaf(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return (leaf, tensor) for a received tensor: the leaf collects the gradient, this stage's code uses the tensor."""
    if data.layout == torch.strided:
        leaf = data.requires_grad_()
        return leaf, without_view(leaf, leaf.shape)  # in C++: each micro-batch comes here, and so does its backward
    leaf = data.new_empty(()).expand(data.shape).requires_grad_()
    return leaf, _Arrival.apply(leaf, data)


class Bookkeeping(TorchFunctionMode):
    """Records of one forward's tensors on a stage."""

    def __init__(self, stage: int, mail: Mail, module: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.sent: list[tuple[GradientEdge, Meta, int]] = []
        """(where its gradient goes, what it is like, stage it went to), in the order of sending."""
        self.received: list[tuple[Tensor, int]] = []
        """(leaf, stage it came from), in the order of receipt."""
        self.is_paused = False
        """Whether what runs is not watched."""
        self._taken: list[StageValue] = []
        self._mail = mail
        self._module = module
        self._memory = Memory(stage)

    def close(self) -> None:
        """Hold nothing of the forward any more: records of tensors that the user's code keeps hold this."""
        for value in self._taken:
            value.release()
        self._taken, self.sent, self.received = [], [], []
        self._memory = Memory(self.stage)

    def _own_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StageValue]:
        """Return the values of this forward, and those of parameters that other stages hold."""
        if self._memory.has_inputs:
            self._follow_written(tensor for tensor in arguments_in([args, kwargs]) if value_of(tensor) is None)
        return self._known_here(values_in(*args, kwargs) if kwargs else values_in(*args))

    def _values_of(self, tensors: list[Tensor]) -> list[StageValue]:
        """Return `_own_values` of these tensors."""
        if self._memory.has_inputs:
            self._follow_written(tensor for tensor in tensors if value_of(tensor) is None)
        return self._known_here([value for tensor in tensors if (value := value_of(tensor)) is not None])

    def _follow_state(self) -> None:
        """Mark what the model keeps and the forward has written under another name (`self.buffer.data`, a row of it)."""
        if not self._memory.has_inputs:
            return
        for module in self._module.modules():
            own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
            kept = [*module._buffers.values(), *tensors_below(own)]
            self._follow_written((t for t in kept if t is not None and value_of(t) is None), is_over=True)

    def _follow_written(self, tensors: Iterable[Tensor], *, is_over: bool = False) -> None:
        """Mark tensors of no known home whose memory a stage has written into under another name: their values are there."""
        for tensor in tensors:
            writer = self._memory.writer_of(tensor, is_over=is_over)
            if writer is None:
                continue
            home, has_gradient = writer
            if home == self.stage:
                self._mark_own(tensor)
                continue
            meta = Meta.of(tensor)
            meta = dataclasses.replace(meta, requires_grad=meta.requires_grad or has_gradient)
            mark(tensor, StageValue(self, home, None, StandIn(meta)))

    def _known_here(self, found: list[StageValue]) -> list[StageValue]:
        others = [place for place, value in enumerate(found) if value.owner is not self and value.home is not None]
        for place in others:
            if self._is_of_model(found[place]):
                found[place] = self._adopt(found[place])
        if self._memory.is_touched:
            self._memory.refuse_stale(found)
        return [value for value in found if value.owner is self or value.home is None] if others else found

    def _is_of_model(self, value: StageValue) -> bool:
        return isinstance(value.owner, Bookkeeping) and value.owner._module is self._module

    def _adopt(self, value: StageValue) -> StageValue:
        """Take over a tensor kept from an earlier batch; its stage and its holder stay the same."""
        if value.heir is not None and value.heir.owner is self:
            return value.heir
        real = value.real
        is_here = value.home == self.stage and real is not None
        stand_in = None if is_here else value.stand_in
        if not is_here and stand_in is None:
            stand_in = StandIn(Meta.of(value.any))
        heir = StageValue(self, value.home, real if is_here else None, stand_in)
        value.heir = heir
        for tensor in (real, value.stand_in):
            if tensor is not None:
                mark(tensor, heir)
        return heir

    def paused(self) -> Paused:
        """Run the code inside the context unwatched."""
        return Paused(self)

    def _stand_in(
        self,
        known: Known,
        home: int | None,
        given: Sequence[Tensor] = (),
        call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
    ) -> Any:
        """Return stand-ins for the results of a call that another stage runs, and repeat its writes."""

        def make(meta: Meta) -> Tensor:
            tensor = StandIn(meta)
            return mark(tensor, StageValue(self, home, None, tensor))

        return known.repeat(make, given, call, self._module.get_submodule)

    def real(self, value: StageValue) -> Tensor:
        """Return the tensor of a value; one of another stage is received."""
        tensor = value.real
        if tensor is None:
            if value.home is None or value.stand_in is None:
                raise OtherParameterError(self.stage)
            meta = Meta.of(value.stand_in)
            tensor = self._mail.receive(meta, value.home)
            if meta.requires_grad and torch.is_grad_enabled():
                leaf, tensor = with_leaf(tensor)
                # Only these: a write in place may give any other one a gradient, which its stage does not wait for.
                self.received.append((leaf, value.home))
            value.receive(tensor)
            self._taken.append(value)
            self._memory.note_copy(value, tensor)
        return tensor

    def _real_if_known(self, tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        if value is not None and (value.owner is self or value.home is None):
            return self.real(value)
        if isinstance(tensor, StandIn):
            raise StrayValueError(f"stage {self.stage}")
        return tensor

    def _mark_own(self, tensor: Tensor) -> Tensor:
        return mark(tensor, StageValue(self, self.stage, tensor, None))

    def _send_all(self, values: list[StageValue], stage: int) -> None:
        for value in values:
            if value.home == self.stage and stage not in value.sent_to:
                value.sent_to.add(stage)
                sent = value.any
                tensor = make_whole(sent)  # what lies in slices over tensor-parallel ranks, too
                if tensor.requires_grad and torch.is_grad_enabled():
                    # The gradient edge is kept, not the tensor: a write in place would make the tensor another node's result.
                    self.sent.append((get_gradient_edge(tensor), Meta.of(tensor), stage))
                self._mail.send(tensor.detach(), stage)
                self._memory.note_copy(value, sent)

    def _send_read(self, tensors: list[Tensor], num_stages: int) -> list[StageValue]:
        """Send values that decide a number, or the size of a result, from the first stage to all others; return them.

        None where a later stage computes one: those before it would have to wait, and cannot.
        """
        read = self._known_here(values_in(tensors))
        if latest_of([value.home for value in read]) != 0:
            return []
        for stage in range(1, num_stages):
            if stage != self.stage:
                self._send_all(read, stage)
        return read

    def _tell(self, data: bytes | None, num_stages: int, device: torch.device) -> bytes:
        """Send bytes from the first stage to all others, and return them; None on those that receive them."""
        length = self._of_first(torch.tensor([len(data or b"")], device=device), num_stages)
        sent = torch.empty(int(length), dtype=torch.uint8)
        if data:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._of_first(sent.to(device), num_stages).cpu().numpy().tobytes()

    def _of_first(self, tensor: Tensor, num_stages: int) -> Tensor:
        """Send a tensor from the first stage to all others, where one of its size stands for it; return the first stage's."""
        if self.stage:
            tensor = mark(made := StandIn(Meta.of(tensor)), StageValue(self, 0, None, made))
        else:
            mark(tensor, StageValue(self, 0, tensor, None))
        (value,) = self._send_read([tensor], num_stages)
        return self.real(value)

    def _with_read(self, tree: Any, read: list[StageValue]) -> Any:
        """Return arguments with these values' tensors, received from the first stage, and zeros for all others."""
        needed = {id(value): self.real(value).detach() for value in read}

        def numbers(tensor: Tensor) -> Tensor:
            value = value_of(tensor)
            if value is None:
                return tensor
            return needed[id(value)] if id(value) in needed else zeros_like_meta(Meta.of(value.any))

        return replace_tensors(tree, numbers)

    def _note_written(self, target: Tensor, home: int | None, *, by_layer: bool = False) -> None:
        """Record that this stage has written into a tensor."""
        known = value_of(target)
        if known is None or known.owner is not self:
            is_input = known is None and home is not None
            known = StageValue(self, home, target, None)
            mark(target, known)
            if is_input:
                self._memory.note_input(target, known, by_layer=by_layer)
        known.home = home
        known.sent_to = set()
        if home is not None:
            self._memory.note_written(known)

    def _write_remote(self, target: Tensor, meta: Meta, home: int | None, *, by_layer: bool = False) -> None:
        """Record that another stage has written into a tensor."""
        value = value_of(target)
        if value is None or value.owner is not self:
            is_input = value is None and home is not None
            value = StageValue(self, home, None, None)
            if is_input:
                self._memory.note_input(target, value, by_layer=by_layer)
        elif value.home == self.stage and (real := value.real) is not None:
            self._memory.note_moved(real)
        value.lose()
        value.home, value.stand_in, value.sent_to = home, StandIn(meta), set()
        mark(target, value)


class _ForwardElsewhere(Bookkeeping):
    """Placeholder for a forward of the same model that another rank has run."""

    def __init__(self, module: nn.Module) -> None:
        TorchFunctionMode.__init__(self)
        self._module = module


def mark_home(tensor: Tensor, home: int, module: nn.Module) -> None:
    """Mark a tensor of the model with the stage that computes it, as another rank's forward has found."""
    mark(tensor, StageValue(_ForwardElsewhere(module), home, tensor, None))


class Paused:
    """A context without a generator: one is entered for each call of a layer."""

    __slots__ = ("_walk", "_was_on_top")

    def __init__(self, walk: Bookkeeping) -> None:
        self._walk = walk
        self._was_on_top = False

    def __enter__(self) -> None:
        walk = self._walk
        walk.is_paused = True
        self._was_on_top = current_function_mode() is walk  # else the user's own mode is, and must stay
        if self._was_on_top:
            TorchFunctionMode.__exit__(walk, None, None, None)

    def __exit__(self, *_: object) -> None:
        if self._was_on_top:
            TorchFunctionMode.__enter__(self._walk)
        self._walk.is_paused = False
