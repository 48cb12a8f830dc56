"""Gradient buckets: flat memory that owns the gradients and is reduced while backward is still running.

A bucket holds the gradients of several parameters in one flat tensor, and `parameter.grad` is a view of it. When a bucket's
last gradient has arrived, the bucket is reduced in the background while autograd works on earlier layers. This is the
standard design (PyTorch DDP, Li et al. 2020, doi:10.14778/3415478.3415530), with two differences:

- Each bucket ends in a *census*: one element a parameter, 1 where this rank has a gradient. The reduction that sums the
  gradients also counts the ranks that used each parameter. So unused parameters need no flag from the user and no
  exchange of their own. A parameter that no rank used keeps `grad=None`.
- Gradients are summed, never averaged: the weights of the samples are applied where the loss is known (run/step.py).

All ranks reduce buckets in one order, whatever order their gradients arrive in. The order is learned: the first step reduces
nothing before backward has ended, and the order in which rank 0's gradients arrived becomes everyone's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.data.unbucketed import raise_taken
from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.reducer import Exchange, GradientSet, GradientSpec, Reducer
from meshwright.errors import ApplyError

__all__: list[str] = []

DEFAULT_BUCKET_BYTES = {"cpu": 64 * 2**20, "cuda": 25 * 2**20}
"""Size of a bucket [bytes]. On the CPU an exchange takes its time from the core that computes, so few large ones are best:
benchmarks/peers/README.md has the measurement. For GPUs it is DDP's default, not measured by us yet."""

FIRST_BUCKET_BYTES = 2**20
"""Size of the bucket that is full first [bytes]: a small one starts the exchange early."""


class Bucket:
    """Flat gradient memory of some parameters of one dtype and device: ``[gradients | census]``.

    Args:
        named_parameters: (FQN, parameter) pairs, in the order in which their gradients lie in memory.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.parameters = [parameter for _, parameter in named_parameters]
        numel = sum(parameter.numel() for parameter in self.parameters)
        like = self.parameters[0]
        self.flat = torch.zeros(numel + len(self.parameters), dtype=like.dtype, device=like.device)
        self.gradients = self.flat[:numel]  # [numel]
        self.census = self.flat[numel:]  # [num_parameters]
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter in self.parameters:
            self.views.append(self.flat.as_strided(parameter.shape, dense_stride(parameter), start))
            start += parameter.numel()
        self.has_gradient = [False] * len(self.parameters)
        self.num_missing = len(self.parameters)
        self.exchange: Exchange | None = None
        self._sent = self._as_set([GradientSpec.of(name, parameter) for name, parameter in named_parameters])
        self.norm = torch.zeros((), device=like.device)
        """2-norm of the reduced gradients."""

    def _as_set(self, specs: Sequence[GradientSpec]) -> GradientSet:
        whole = (torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat).view(-1)
        *tensors, census = whole.split([*(spec.numel for spec in specs), whole.numel() - sum(s.numel for s in specs)])
        return GradientSet(specs, tensors, self.has_gradient, census, whole)

    def begin_step(self) -> None:
        """Reset the bucket: every gradient is awaited again."""
        self.has_gradient[:] = [False] * len(self.parameters)
        self.num_missing = len(self.parameters)
        self.exchange = None

    def launch(self, reducer: Reducer) -> None:
        """Start the reduction; parameters without a gradient contribute zeros."""
        if all(self.has_gradient):
            self.census.fill_(1)
        else:
            for view, present in zip(self.views, self.has_gradient, strict=True):
                if not present:
                    view.zero_()
            self.census.copy_(torch.tensor(self.has_gradient, device=self.flat.device))
        self.exchange = Exchange(reducer.all_reduce(self._sent))

    def finish(self, scale: float) -> None:
        """Wait for the sum, scale it, and give each parameter its view, or None where no rank had a gradient."""
        if self.exchange is not None:
            self.exchange.finish()
            self.exchange = None
        if scale != 1.0:
            self.gradients.mul_(scale)
        # Here, because the next bucket is still on its way: this thread would have nothing else to do.
        self.norm = torch.linalg.vector_norm(self.gradients)
        used = self.has_gradient if all(self.has_gradient) else (self.census != 0).tolist()
        for parameter, view, present in zip(self.parameters, self.views, used, strict=True):
            parameter.grad = view if present else None


def dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return strides in which a parameter fills its memory without a hole: its own (channels_last, say), or plain ones.

    A gradient laid out like its parameter lets optimizers and convolutions run without copies.
    """
    dense = torch.empty_like(parameter, memory_format=torch.preserve_format).stride() == parameter.stride()
    return parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()


@dataclasses.dataclass(slots=True)
class _GradientSlot:
    """Position of one parameter's gradient in its bucket."""

    position: int  # the parameter's place in registration order
    bucket: Bucket
    index: int  # its place in the bucket
    is_ready: bool = False  # has arrived in the armed backward


class GradientBuckets:
    """The buckets of all trainable parameters of one module.

    Args:
        named_parameters: (FQN, parameter) pairs that get dense gradients, in registration order, each once.
        group: The ranks that hold copies of these parameters.
        bucket_bytes: The size at which a bucket is full [bytes]; None is the default of each device.
        overlap: Whether reduction may run while backward does.
        reducer: Sums the buckets over the group.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        group: Communicator,
        *,
        bucket_bytes: int | None,
        overlap: bool,
        reducer: Reducer,
    ) -> None:
        self.group = group
        self.reducer = reducer
        self.bucket_bytes = bucket_bytes
        self.overlap = overlap
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.buckets: list[Bucket] = []
        self._is_armed = False
        self._is_awaited = False
        self._is_learning = True
        self._arrivals: list[int] = []
        self._learned_order: list[int] | None = None
        self._num_launched = 0
        self._slots: list[_GradientSlot] = []
        self._taken: set[int] = set()
        self._fill_buckets(list(reversed(range(len(self.parameters)))))
        self._hooks = [self._watch(place) for place in range(len(self.parameters))]

    def _watch(self, place: int) -> Any:
        on_gradient = functools.partial(self._on_gradient, self._slots[place])
        return self.parameters[place].register_post_accumulate_grad_hook(on_gradient)

    def _fill_buckets(self, order: Sequence[int]) -> None:
        """Distribute the parameters over buckets in this order (positions in registration order)."""
        full: list[list[int]] = []
        filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position in order:
            parameter = self.parameters[position]
            members = filling.setdefault((parameter.dtype, parameter.device), [])
            members.append(position)
            size = self.bucket_bytes or DEFAULT_BUCKET_BYTES.get(parameter.device.type, DEFAULT_BUCKET_BYTES["cuda"])
            limit = min(FIRST_BUCKET_BYTES, size) if not full else size
            if sum(self.parameters[member].nbytes for member in members) >= limit:
                full.append(filling.pop((parameter.dtype, parameter.device)))
        full.extend(filling.values())
        slots: dict[int, _GradientSlot] = {slot.position: slot for slot in self._slots}
        self.buckets = []
        for members in full:
            bucket = Bucket([(self.names[position], self.parameters[position]) for position in members])
            self.buckets.append(bucket)
            for index, position in enumerate(members):
                slot = slots.setdefault(position, _GradientSlot(position, bucket, index))
                slot.bucket, slot.index = bucket, index
        self._slots = [slots[position] for position in range(len(self.parameters))]

    def begin_step(self) -> None:
        """Drop the gradients, and adopt the learned order."""
        for place, parameter in enumerate(self.parameters):
            parameter.grad = None
            hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks and next(reversed(hooks)) != self._hooks[place].id:
                # A user's hook was registered after ours. Ours must run last, on the gradient that is sent.
                self._hooks[place].remove()
                self._hooks[place] = self._watch(place)
        if self._learned_order is not None:
            self._fill_buckets(self._learned_order)
            self._learned_order = None
        for bucket in self.buckets:
            bucket.begin_step()
        for slot in self._slots:
            slot.is_ready = False
        self._num_launched = 0
        self._arrivals = []
        self._taken.clear()
        self._is_armed = self._is_awaited = False

    def wait_for_end(self) -> None:
        """Have the next backward reduce nothing before its end, and show no order: its graph may be of several models."""
        self._is_awaited = True

    def _learn_order(self) -> None:
        seen = set(self._arrivals)
        order = self._arrivals + [p for p in reversed(range(len(self.parameters))) if p not in seen]
        # Rank 0 with an empty share has seen nothing: learn again from the next step.
        message = torch.tensor([len(seen), *order], dtype=torch.int64, device=self.buckets[0].flat.device)
        self.group.broadcast(message)
        num_seen, *order = message.tolist()
        if num_seen:
            self._is_learning = False
            self._learned_order = order  # for the next step: this one's gradients stay where they are

    def arm(self) -> None:
        """Mark the next backward as the step's last: a bucket is reduced as soon as it is complete."""
        self._is_armed = True

    def _on_gradient(self, slot: _GradientSlot, parameter: torch.Tensor) -> None:
        bucket, index = slot.bucket, slot.index
        view = bucket.views[index]
        grad = parameter.grad
        if slot.is_ready and bucket.exchange is not None:
            raise ApplyError(
                f"the gradient of '{self.names[slot.position]}' arrived twice in one backward, after its reduction had "
                "begun (reentrant activation checkpointing of a module that is used twice does that)",
                fix="pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or add overlap=off to the plan",
            )
        if grad is None:
            # Raising here would leave the other ranks waiting. NaN in the sum makes every rank ask for the cause.
            self._taken.add(slot.position)
            view.fill_(torch.nan)
            parameter.grad = view
        elif grad is not view:
            # The first gradient of the step comes in autograd's own memory; later ones are added in place.
            view.copy_(grad.to_dense() if grad.is_sparse else grad.detach())
            parameter.grad = view
        bucket.has_gradient[index] = True
        if not self._is_armed:
            return
        if slot.is_ready:
            self.overlap = False  # arrives more than once a backward: only its end is safe
            return
        slot.is_ready = True
        if self._is_learning:
            self._arrivals.append(slot.position)
        bucket.num_missing -= 1
        if bucket.num_missing == 0 and self.overlap and not self._is_learning:
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._num_launched < len(self.buckets) and self.buckets[self._num_launched].num_missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        self.buckets[self._num_launched].launch(self.reducer)
        # Its first exchange is on its way, and the second one of the bucket before it may follow: on all ranks in this place.
        before = self.buckets[self._num_launched - 1].exchange if self._num_launched else None
        if self.reducer.num_stages > 1 and before is not None:
            before.advance()
        self._num_launched += 1

    def finish(self, scale: float) -> None:
        """Reduce the remaining buckets, wait for all, and set every parameter's `.grad`, multiplied by `scale`."""
        self._is_armed = False
        while self._num_launched < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets:
            bucket.finish(scale)
        if self._is_learning and self.buckets and not self._is_awaited:
            self._learn_order()

    def refuse_taken(self) -> None:
        """Raise ApplyError, on every rank, if a hook removed a gradient on any; every rank calls this."""
        raise_taken(self.names, self._taken, self.group, self.buckets[0].flat.device if self.buckets else None)

    def tensors(self) -> list[torch.Tensor]:
        """Return tensors that together hold each gradient element once."""
        return [bucket.gradients for bucket in self.buckets]

    def squares(self, device: torch.device) -> torch.Tensor:
        """Return the sum of the whole gradient's squares, a float64 scalar on this device."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self.buckets:
            total += bucket.norm.to(device).double().square()
        return total

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
