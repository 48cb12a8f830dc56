"""Roles of modules at a region's edge: the exchanges and changes around their forwards.

Inside a region the user's own code runs, on smaller tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright._torch_private import Convolution, is_in_backward
from meshwright.apply.tensor.attention import attention_forward
from meshwright.apply.tensor.region_state import RunningRegion
from meshwright.apply.tensor.sizes import Resizing
from meshwright.apply.tensor.slices import Slices, make_whole
from meshwright.apply.tensor.stored import stored_forward
from meshwright.apply.tensor.whole import replaced_tensors
from meshwright.comm.functional import (
    all_gather_along,
    reduce_from_group,
    scatter_to_group,
)
from meshwright.errors import ApplyError
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

Forward = Callable[..., Any]


def unless_whole(original: Forward, running: RunningRegion, forward: Forward) -> Forward:
    """Return a forward that is the module's own while its region runs as on one device."""

    def chosen(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (running.is_open or is_in_backward()):
            raise ApplyError(
                f"a {type(self).__name__} of {running.region.scope or 'the model'!r} was called outside of the module with which "
                f"it was cut over {running.group.size} ranks, and its result is only a part",
                fix="call the module around it, as in the first batch; or pass an example_batch= that calls it so; or use tp=1",
            )
        return (original if running.is_whole else forward)(self, *args, **kwargs)

    return chosen


def role_forward(role: str, module: nn.Module, running: RunningRegion, *, takes_whole: bool = False) -> Forward:
    """Return the forward of a module with a role; `takes_whole` where its input is never in slices."""
    original = type(module).forward
    if role == "attention":
        return attention_forward(running)
    if role == "row":
        return _row_forward(original, running)
    if role == "sum":
        return _sum_forward(original, running)
    if role == "vocabulary":
        return _vocabulary_forward(original, running)
    if role == "stored":
        return stored_forward(original, running)
    if role in ("inner", "channels"):
        return _inner_forward(original, running, -1 if role == "inner" else 1)
    return _column_forward(original, running, role, is_whole=takes_whole)


def _column_forward(original: Forward, running: RunningRegion, role: str, *, is_whole: bool) -> Forward:
    def forward(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        own = _channels_of_groups(self, x, running) if role == "gathered" else None
        result = original(self, running.enter(x, is_whole=is_whole) if own is None else own, *args, **kwargs)
        if role == "column":
            return result
        running.forget()
        dim = 1 if isinstance(self, Convolution) else result.dim() - 1
        if role != "gathered":
            return running.slices(result, dim)
        whole = running.gather(result, dim)
        slicing = None if is_whole else running.slicing
        return whole if slicing is None else slicing.scatter_again(whole)

    return forward


def _channels_of_groups(module: nn.Module, x: Any, running: RunningRegion) -> Tensor | None:
    """Return the channels that this rank's groups of a convolution take; None where the module has all of its groups."""
    if not (isinstance(module, Convolution) and isinstance(x, Tensor) and x.dim() > 1) or running.slicing is not None:
        return None
    weight: Any = module.weight
    if module.transposed or weight.shape[1] * module.groups == x.shape[1]:
        return None
    return scatter_to_group(make_whole(x), running.group, dim=1, sizes=running.sizes(x.shape[1]))


def _row_forward(original: Forward, running: RunningRegion) -> Forward:
    def forward(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        bias = self._parameters.get("bias")
        if bias is None:
            return running.leave(original(self, x, *args, **kwargs))
        # Added once, after the sum. A class that requires one gets zeros.
        hides = isinstance(self, (nn.Linear, Convolution))
        with replaced_tensors(self, {"bias": None if hides else torch.zeros_like(bias, requires_grad=False)}):
            total = running.leave(original(self, x, *args, **kwargs))
        shape = (-1, *[1] * (total.dim() - 2)) if isinstance(self, Convolution) else (-1,)
        return total + bias.reshape(shape)

    return forward


def _sum_forward(original: Forward, running: RunningRegion) -> Forward:
    once = running.region.below(running.region.scope).once

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def enter(tensor: Tensor) -> Tensor:
            # Without gradients only its sizes distinguish the stream from a mask.
            enters = tensor.requires_grad or isinstance(tensor, Slices) or running.is_slice_of_stream(tensor)
            return running.enter(tensor) if enters else tensor

        args, kwargs = map_tensors((args, kwargs), enter)
        if (first := next(tensors_in((args, kwargs)), None)) is not None:
            running.draw_apart(first)  # also where nothing enters, without gradients
        position = iter(range(2**31))
        # One rank's term includes them. It multiplies by one, so that all ranks have the same graph: where gradients are sent
        # in backward (ZeRO-2 and 3), the ranks must reach their exchanges in the same order.
        is_here = int(running.group.group_rank == 0)
        with replaced_tensors(self, {name: self.get_parameter(name) * is_here for name in once}):
            outputs = original(self, *args, **kwargs)
        return map_tensors(outputs, lambda tensor: running.leave(tensor) if next(position) == 0 else tensor)

    return forward


def _inner_forward(original: Forward, running: RunningRegion, along: int) -> Forward:
    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        dim = along % x.dim()
        sizes = running.sizes_of(x, dim)
        whole = all_gather_along(x, running.group, dim=dim, sizes=sizes)
        result = original(self, whole, *args, **kwargs)
        return result.split(sizes, dim)[running.group.group_rank]

    return forward


def _vocabulary_forward(original: Forward, running: RunningRegion) -> Forward:
    first, last = running.region.units(running.group.size, running.group.group_rank)

    def forward(self: Any, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        num = running.region.num_units
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num:
            raise IndexError(f"a token id is outside 0 .. {num - 1}: {int(ids.min())} .. {int(ids.max())}")
        strange = (ids < first) | (ids >= last)
        # A look-up may do more with its ids (norms, counts), so ids of other ranks must not be among them.
        counts = isinstance(self, nn.Embedding) and (
            self.scale_grad_by_freq or self.sparse or self.max_norm is not None
        )
        local = (ids - first).masked_fill(strange, 0) if not counts else (ids - first)[~strange]
        padding: Any = self.padding_idx
        local_padding: Any = padding - first if isinstance(padding, int) and first <= padding < last else None
        self.padding_idx = local_padding
        try:
            if last > first:
                vectors = original(self, local, *args, **kwargs)
            else:
                weight: Any = self.weight
                vectors = weight.sum() + weight.new_zeros((*ids.shape, weight.shape[-1]))
        finally:
            self.padding_idx = padding
        if counts and last > first:
            vectors = vectors.new_zeros((*ids.shape, vectors.shape[-1])).index_put((~strange,), vectors)
        return reduce_from_group(vectors.masked_fill(strange.unsqueeze(-1), 0.0), running.group)

    return forward


def scope_forward(module: nn.Module, running: RunningRegion) -> Forward:
    """Return the forward of a region's scope, for tensors that enter or leave in slices and sizes that need translation."""
    original = type(module).forward
    region = running.region
    inputs = dict(region.inputs)
    results = dict(region.results)

    def enter(index: int, tensor: Tensor) -> Tensor:
        # Slices of another region with the same units, at any position: an earlier argument may be missing in this call.
        if isinstance(tensor, Slices) and tensor.sizes == region.shares(sum(tensor.sizes), running.group.size):
            return tensor.local_to_use()
        if index not in inputs:
            return tensor
        whole, dim = make_whole(tensor), inputs[index]
        if whole.dim() <= dim or whole.shape[dim] == 1 or whole.shape[dim] % region.num_units:
            return whole
        if whole.shape[dim] == region.num_units:
            return scatter_to_group(whole, running.group, dim=dim, sizes=running.sizes(region.num_units))
        # One for each sample and unit in one dim.
        apart = whole.unflatten(dim, (-1, region.num_units))
        return scatter_to_group(apart, running.group, dim=dim + 1, sizes=running.sizes(region.num_units)).flatten(
            dim, dim + 1
        )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inputs:
            position = iter(range(2**31))
            args, kwargs = map_tensors((args, kwargs), lambda tensor: enter(next(position), tensor))
        with Resizing(region, running.group) if region.resizes else contextlib.nullcontext():
            outputs = original(self, *args, **kwargs)
        if not results:
            return outputs
        place = iter(range(2**31))

        def mark(tensor: Tensor) -> Tensor:
            dim = results.get(next(place))
            return tensor if dim is None or isinstance(tensor, Slices) else running.slices(tensor, dim)

        return map_tensors(outputs, mark)

    return forward


def entry_forward(module: nn.Module, running: RunningRegion) -> Forward:
    """Return the forward of a module around a region's columns, which gathers the sequence for them."""
    original = type(module).forward
    wanted = set(running.region.entered)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        place = iter(range(2**31))

        def enter(tensor: Tensor) -> Any:
            return running.enter(tensor) if next(place) in wanted else tensor

        args, kwargs = map_tensors((args, kwargs), enter)
        return original(self, *args, **kwargs)

    return forward


def change_stream(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the tree with a function applied to its stream: the first 3-dim floating-point tensor."""
    done = False

    def change(tensor: Tensor) -> Tensor:
        nonlocal done
        if done or not is_stream(tensor):
            return tensor
        done = True
        return function(tensor)

    return map_tensors(tree, change)


def is_stream(tensor: Tensor) -> bool:
    """Tell whether a tensor may be the stream between layers: [batch, sequence, width]."""
    return tensor.dim() == 3 and tensor.is_floating_point()


def shared_forward(module: nn.Module, full_units: int, running: RunningRegion, *, takes_whole: bool) -> Forward:
    """Return the forward of a Linear of grouped keys or values: this rank uses a part of a weight that all hold whole."""
    first, last = running.region.units(running.group.size, running.group.group_rank)
    ratio = running.region.num_units // full_units
    wanted = sorted({unit // ratio for unit in range(first, last)})
    weight_rows = module.get_parameter("weight").shape[0]
    size = weight_rows // full_units

    def forward(self: nn.Module, x: Any) -> Any:
        x = running.enter(x, is_whole=takes_whole)
        rows = slice(wanted[0] * size, (wanted[-1] + 1) * size) if wanted else slice(0, 0)
        weight: Any = self.weight
        bias: Any = self.bias
        return F.linear(x, weight[rows], None if bias is None else bias[rows])

    return forward
