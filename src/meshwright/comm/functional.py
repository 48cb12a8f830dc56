"""Differentiable collectives of tensor-parallel and sequence-parallel layers.

[Note: conjugate pairs] Backward of each operation is forward of its partner, so second derivatives are right, too.

    forward                 of                  gives                backward
    copy_to_group           replicated          replicated           reduce_from_group: all-reduce
    reduce_from_group       partial sums        replicated           copy_to_group: nothing
    scatter_to_group        replicated          own slice            gather_from_group: all-gather
    gather_from_group       slices              replicated           scatter_to_group: own slice
    all_gather_along        slices              replicated           reduce_scatter_along
    reduce_scatter_along    partial sums        own slice of sum     all_gather_along

The two gathers differ in what follows them. After `gather_from_group` every rank computes the same, so every rank has the
whole gradient and keeps its slice. After `all_gather_along` the ranks compute different things, so the gradients are terms of a
sum. The first two pairs are f and g of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3), the last is g and its
conjugate of Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.

All ranks of a group call the same operations in the same order, with tensors that require gradients on all ranks or on none.
Otherwise an all-reduce that only some ranks enter in backward waits until the timeout. Inputs are never written to. In a group
of one rank every operation returns its input.

The last four take `dim` and `sizes`: every rank's size along that dim, in group order; they may differ, and may be 0. They raise
ConfigError where these do not fit the group, or the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright._torch_dispatch import carries_tangents, is_transformed
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError, ConfigError

__all__ = [
    "all_gather_along",
    "copy_to_group",
    "gather_from_group",
    "reduce_from_group",
    "reduce_scatter_along",
    "scatter_to_group",
]

WATCHERS: dict[int, Callable[..., Tensor]] = {}
"""Thread -> what makes its exchanges, `(function, tensor, how)`. Empty in training: for checks beforehand."""

How = tuple["Communicator", int, tuple[int, ...], str]
"""Of an exchange: the group, the dim along which it goes, the ranks' sizes there, its name. Whole tensors: dim 0 and no sizes."""


def _make(function: type[torch.autograd.Function], tensor: Tensor, how: How) -> Tensor:
    watcher = WATCHERS.get(threading.get_ident()) if WATCHERS else None
    if watcher is not None:
        return watcher(function, tensor, how)
    if is_transformed() or carries_tangents():
        raise ApplyError(
            "a transform of torch.func (vmap, grad, jvp) or torch.autograd.forward_ad runs code that ranks have cut: it has no "
            f"rule for an exchange ({how[3]})",
            fix="use a plan without tp (dp, zero), or compute the derivative with torch.autograd",
        )
    return function.apply(tensor, how)


def copy_to_group(tensor: Tensor, group: Communicator) -> Tensor:
    """Pass a replicated tensor to computations that differ between ranks; backward sums their gradients.

    Args:
        tensor: Any shape, the same on every rank.
        group: The ranks.

    Returns:
        The same values; not to be written to.
    """
    return tensor if group.size == 1 else _make(_Copy, tensor, (group, 0, (), "copy"))


def reduce_from_group(tensor: Tensor, group: Communicator) -> Tensor:
    """Sum the ranks' tensors for a computation that is the same on all ranks; backward exchanges nothing.

    Args:
        tensor: This rank's term; one shape on all ranks.
        group: The ranks.

    Returns:
        The sum, on every rank.
    """
    return tensor if group.size == 1 else _make(_Reduce, tensor, (group, 0, (), "reduce"))


def gather_from_group(tensor: Tensor, group: Communicator, *, dim: int, sizes: Sequence[int]) -> Tensor:
    """Gather the ranks' slices for a computation that is the same on all ranks; backward keeps the own slice."""
    return _along("gather", tensor, group, dim, sizes, is_slice=True)


def scatter_to_group(tensor: Tensor, group: Communicator, *, dim: int, sizes: Sequence[int]) -> Tensor:
    """Keep this rank's slice of a replicated tensor, in memory of its own; backward gathers the slices' gradients."""
    return _along("scatter", tensor, group, dim, sizes, is_slice=False)


def all_gather_along(tensor: Tensor, group: Communicator, *, dim: int, sizes: Sequence[int]) -> Tensor:
    """Gather the ranks' slices for computations that differ between ranks; backward is a reduce-scatter."""
    return _along("all_gather", tensor, group, dim, sizes, is_slice=True)


def reduce_scatter_along(tensor: Tensor, group: Communicator, *, dim: int, sizes: Sequence[int]) -> Tensor:
    """Sum the ranks' tensors, of one shape, and keep this rank's slice of the sum; backward is an all-gather."""
    return _along("reduce_scatter", tensor, group, dim, sizes, is_slice=False)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, how: How) -> Tensor:
        ctx.how = how
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Reduce.apply(gradients[0], ctx.how), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, how: How) -> Tensor:
        ctx.how = how
        # A copy: autograd may have passed the same gradient to other nodes, and the caller may need its tensor.
        total = tensor.clone(memory_format=torch.contiguous_format)
        if total.numel():
            how[0].all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Copy.apply(gradients[0], ctx.how), None


class _Along(torch.autograd.Function):
    """One of the four exchanges along a dim, by its name."""

    # Two arguments: torch looks at each one, at each call.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, how: How) -> Tensor:
        group, dim, sizes, name = how
        exchange, conjugate = _EXCHANGES[name]
        ctx.how = (group, dim, sizes, conjugate)
        return exchange(tensor, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Along.apply(gradients[0], ctx.how), None


def _scatter(tensor: Tensor, group: Communicator, dim: int, sizes: tuple[int, ...]) -> Tensor:
    start = sum(sizes[: group.group_rank])
    # A copy: autograd forbids writing in place to a view that a function of ours returns.
    return tensor.narrow(dim, start, sizes[group.group_rank]).clone(memory_format=torch.contiguous_format)


def _all_gather(tensor: Tensor, group: Communicator, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Gather slices along a dim. The backends take equal, contiguous pieces, so uneven ones are padded to the largest.

    The ledger counts the bytes sent, padding included.
    """
    largest = max(sizes)
    piece = _padded(tensor, dim, largest)
    stacked = tensor.new_empty((group.size * piece.shape[0], *piece.shape[1:]))
    if stacked.numel():
        group.all_gather_stacked(stacked, piece)
    if dim == 0 and min(sizes) == largest:
        return stacked
    pieces = stacked.view(group.size, *piece.shape).unbind(0)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(pieces, sizes, strict=True)], dim)


def _reduce_scatter(tensor: Tensor, group: Communicator, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Sum and cut along a dim; pieces are stacked along dim 0, and uneven ones padded, as in `_all_gather`."""
    largest, size = max(sizes), sizes[group.group_rank]
    if dim == 0 and min(sizes) == largest:
        stacked = tensor.contiguous()
    else:
        stacked = torch.cat([_padded(piece, dim, largest) for piece in tensor.split(sizes, dim)])
    own = tensor.new_empty((stacked.shape[0] // group.size, *stacked.shape[1:]))
    if stacked.numel():
        group.reduce_scatter_stacked(own, stacked)
    return own if size == largest else own.narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)


def _padded(piece: Tensor, dim: int, size: int) -> Tensor:
    if piece.shape[dim] == size:
        return piece.contiguous()
    padded = piece.new_zeros((*piece.shape[:dim], size, *piece.shape[dim + 1 :]))
    padded.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    return padded


_EXCHANGES: dict[str, tuple[Callable[[Tensor, Communicator, int, tuple[int, ...]], Tensor], str]] = {
    "gather": (_all_gather, "scatter"),
    "scatter": (_scatter, "gather"),
    "all_gather": (_all_gather, "reduce_scatter"),
    "reduce_scatter": (_reduce_scatter, "all_gather"),
}
"""Name of an exchange along a dim -> what it does, and its conjugate's name. See [Note: conjugate pairs]."""


def _along(name: str, tensor: Tensor, group: Communicator, dim: int, sizes: Sequence[int], *, is_slice: bool) -> Tensor:
    if group.size == 1:
        return tensor
    dim, sizes = _check(tensor, group, dim, sizes, is_slice=is_slice)
    return _make(_Along, tensor, (group, dim, sizes, name))


def _check(
    tensor: Tensor, group: Communicator, dim: int, sizes: Sequence[int], *, is_slice: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the dim counted from 0, and the sizes, after checking them against the group and the tensor."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError(
            f"dim={dim} of a tensor with {tensor.dim()} dims (rule: -{tensor.dim()} <= dim < {tensor.dim()})"
        )
    if len(sizes) != group.size:
        raise ConfigError(f"{len(sizes)} sizes for a group of {group.size} ranks (rule: one for each rank)")
    expected = sizes[group.group_rank] if is_slice else sum(sizes)
    if tensor.shape[dim] != expected:
        what = f"this rank ({group.group_rank} of the group) holds" if is_slice else "the tensor has"
        raise ConfigError(
            f"{what} {tensor.shape[dim]} entries along dim {dim}, by sizes={list(sizes)} it would be {expected}"
        )
    return dim % tensor.dim(), tuple(sizes)
