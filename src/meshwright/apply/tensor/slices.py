"""A tensor that lies in slices on the ranks, and looks whole: the logits of a vocabulary that is cut.

To put logits together costs more than the head itself, and the usual loss does not need it. So they stay in slices as long as
they are only reshaped along other dims and then given to cross-entropy. Whatever else is done with them gathers them first,
once; so any loss is right, and the usual one is quick. The one tensor subclass at run time; it never enters a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm._torch_private import without_function_subclasses
from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import gather_from_group
from meshwright.nn.cross_entropy import vocab_parallel_cross_entropy

__all__: list[str] = []

_RESHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}
_CASTS = {
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.to,
    torch.Tensor.type,
    torch.Tensor.contiguous,
    torch.Tensor.clone,
}
_FACTS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.dtype.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.device.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.ndim.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.layout.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.is_cuda.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.is_sparse.__get__,  # pyright: ignore[reportAttributeAccessIssue]
}
_GRADIENT_FACTS = {torch.Tensor.requires_grad.__get__: "requires_grad", torch.Tensor.grad_fn.__get__: "grad_fn"}  # pyright: ignore


class Slices(Tensor):
    """A whole tensor of which this rank has one slice along a dim.

    Args:
        local: This rank's slice, with its graph.
        group: The ranks.
        dim: Where the slices lie, counted from 0.
        sizes: Every rank's size along it.
    """

    local: Tensor
    group: Communicator
    cut_dim: int
    sizes: tuple[int, ...]
    _whole: Tensor | None

    @staticmethod
    def __new__(cls: type[Slices], local: Tensor, group: Communicator, dim: int, sizes: Sequence[int]) -> Slices:
        shape = list(local.shape)
        shape[dim] = sum(sizes)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.group, made.cut_dim, made.sizes, made._whole = (
            local,
            group,
            dim % local.dim(),
            tuple(sizes),
            None,
        )
        return made

    def __init__(self, local: Tensor, group: Communicator, dim: int, sizes: Sequence[int]) -> None:
        """Everything is done by `__new__`: a tensor's own `__init__` takes no arguments."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Slices(shape={tuple(self.shape)}, dim={self.cut_dim}, sizes={self.sizes})"

    def gathered(self) -> Tensor:
        """Return the plain, whole tensor. Every rank of the group comes here together."""
        if self._whole is None:
            self._whole = gather_from_group(self.local, self.group, dim=self.cut_dim, sizes=self.sizes)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _FACTS:
            with without_function_subclasses():
                return func(*args, **kwargs)
        if isinstance(first, Slices):
            if func in _GRADIENT_FACTS:
                return getattr(first.local, _GRADIENT_FACTS[func])
            kept = first._kept_in_slices(func, args, kwargs)
            if kept is not None:
                return kept
        return func(*_gathered(args), **_gathered(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_gathered(args), **_gathered(kwargs or {}))

    # -- what needs no gathering --------------------------------------------------------------------------------

    def _kept_in_slices(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func in _CASTS and not any(isinstance(value, Tensor) for value in args[1:]):
            return self._like(func(self.local, *args[1:], **kwargs), self.cut_dim)
        if func in _RESHAPES and self.cut_dim == self.dim() - 1:
            return self._reshaped(args[1:])
        if func is torch.Tensor.flatten or func is torch.flatten:
            return self._flattened(args[1:], kwargs)
        if func is torch.Tensor.__getitem__:
            return self._item(args[1])
        if func is F.cross_entropy:
            return self._cross_entropy(*args[1:], **kwargs)
        return None

    def _like(self, local: Tensor, dim: int) -> Slices:
        return Slices(local, self.group, dim, self.sizes)

    def _reshaped(self, sizes: Any) -> Any:
        shape = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else list(sizes)
        if not shape or not all(isinstance(size, int) for size in shape):
            return None
        rest = math.prod(self.shape[:-1])
        if shape[-1] == -1 and math.prod(shape[:-1]) == rest:
            shape[-1] = self.shape[-1]
        if shape[-1] != self.shape[-1] or (-1 not in shape and math.prod(shape[:-1]) != rest):
            return None
        known = math.prod(size for size in shape[:-1] if size != -1)
        shape = [rest // max(known, 1) if size == -1 else size for size in shape]
        return self._like(self.local.reshape(*shape[:-1], self.local.shape[-1]), len(shape) - 1)

    def _flattened(self, args: Any, kwargs: Any) -> Any:
        start = kwargs.get("start_dim", args[0] if args else 0) % self.dim()
        end = kwargs.get("end_dim", args[1] if len(args) > 1 else -1) % self.dim()
        if start <= self.cut_dim <= end:
            return None
        moved = self.cut_dim - (end - start) if self.cut_dim > end else self.cut_dim
        return self._like(self.local.flatten(start, end), moved)

    def _item(self, index: Any) -> Any:
        """Keep `x[..., :-1, :]` and the like: plain slices, of which the one along the cut dim takes everything."""
        items = list(index) if isinstance(index, tuple) else [index]
        if not all(item is Ellipsis or isinstance(item, slice) for item in items) or items.count(Ellipsis) > 1:
            return None
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items[at : at + 1] = [slice(None)] * (self.dim() - len(items) + 1)
        if len(items) > self.cut_dim and items[self.cut_dim] != slice(None):
            return None
        return self._like(self.local[tuple(items)], self.cut_dim)

    def _cross_entropy(  # noqa: PLR0917 - F.cross_entropy's own
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        is_plain = size_average is None and reduce is None and not target.is_floating_point()
        classes_last = self.dim() <= 2 and self.cut_dim == self.dim() - 1
        classes_second = self.dim() > 2 and self.cut_dim == 1
        if not is_plain or not (classes_last or classes_second):
            return None
        local = self.local if classes_last else self.local.movedim(1, -1)
        return vocab_parallel_cross_entropy(
            local,
            target,
            self.group,
            vocab_size=self.shape[self.cut_dim],
            sizes=self.sizes,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,  # pyright: ignore[reportArgumentType] - checked there
            weight=weight,
        )


def _gathered(tree: Any) -> Any:
    if isinstance(tree, Slices):
        return tree.gathered()
    if isinstance(tree, (list, tuple)):
        items = [_gathered(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: _gathered(value) for key, value in tree.items()}
    return tree


def make_whole(tree: Any) -> Any:
    """Return the tensor gathered, where it is in slices."""
    return tree.gathered() if isinstance(tree, Slices) else tree
