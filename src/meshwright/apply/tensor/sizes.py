"""Translation of sizes that code computes from the full model to the shard's: `y.view(B, T, C)` where this rank has C / 2.

Most attention code takes its heads as -1 or from an integer attribute, which is replaced once (`Region.integers`). Code that
takes the width from its input's shape leaves nothing to replace. For such regions alone, reshapes, splits and expansions pass
through here while the scope runs. A size that cannot be right for this tensor, but would be for the whole one, is replaced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.tensor_layout import Region
from meshwright.comm.communicator import Communicator

__all__: list[str] = []

_RESHAPES: Final = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}
_UNFLATTENS: Final = {torch.Tensor.unflatten, torch.unflatten}
_SPLITS: Final = {torch.Tensor.split, torch.split}
_EXPANDS: Final = {torch.Tensor.expand}


def numbers_compared(func: Callable[..., Any], args: Sequence[Any], kwargs: Any, given: Collection[int]) -> list[int]:
    """Return the numbers by which a call of the whole model would be translated or left, as `Resizing` compares them.

    Where such a number follows from a size of the batch, another batch may be translated in another way.

    Args:
        func: The called function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        given: Sizes of the scope's arguments. Leading dims of these sizes, which a reshape keeps, are not compared.
    """
    if not args or not isinstance(args[0], Tensor):
        return []
    tensor, *rest = args
    if func in _RESHAPES and not kwargs:
        sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        pairs = zip(sizes, tensor.shape, strict=False)
        kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1] and pair[0] in given, pairs))
        return [*_ints(sizes[kept:]), math.prod(tensor.shape[kept:])]
    if func in _UNFLATTENS and len(rest) > 1 and isinstance(rest[1], (tuple, list)):
        return [*_ints(rest[1]), tensor.shape[rest[0]]]
    if func in _SPLITS and rest:
        sizes = rest[0] if isinstance(rest[0], (tuple, list)) else [rest[0]]
        return [*_ints(sizes), tensor.shape[kwargs.get("dim", rest[1] if len(rest) > 1 else 0)]]
    if func is torch.Tensor.__getitem__:
        return _bounds_compared(tensor, rest[0])
    return []


def _ints(sizes: Sequence[Any]) -> list[int]:
    return [int(size) for size in sizes if isinstance(size, int)]


def _bounds_compared(tensor: Tensor, index: Any) -> list[int]:
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is Ellipsis or isinstance(item, slice) for item in items):
        return []
    lead = tensor.dim() - sum(item is not Ellipsis for item in items)
    found: list[int] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += lead
            continue
        bounds = [bound for bound in _ints([item.start, item.stop]) if bound > 0]
        found += [*bounds, tensor.shape[dim]] if bounds else []
        dim += 1
    return found


class Resizing(TorchFunctionMode):
    """Translates sizes while a region's scope runs.

    Args:
        region: The region; only sizes that are its units' or its groups' may be translated.
        group: The ranks that share it.
    """

    def __init__(self, region: Region, group: Communicator) -> None:
        super().__init__()
        first, last = region.units(group.size, group.group_rank)
        self._num_units, self._own = region.num_units, last - first

    def _local(self, size: int) -> int | None:
        """Return this rank's share of a full size, or None where it is not a multiple of the units."""
        if size < self._num_units or size % self._num_units:
            return None
        return size // self._num_units * self._own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args = tuple(args)
        if func in _RESHAPES and not kwargs:
            args = self._reshape(args)
        elif func in _UNFLATTENS and len(args) > 2:
            args = self._unflatten(args)
        elif func in _SPLITS and len(args) > 1:
            args = self._split(args, kwargs)
        elif func in _EXPANDS and not kwargs:
            args = self._expand(args)
        elif func is torch.Tensor.__getitem__:
            args = self._item(*args)
        return func(*args, **kwargs)

    def _reshape(self, args: Any) -> Any:
        tensor, *rest = args
        sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else list(rest)
        return (tensor, *self._fitting(sizes, tensor.shape)) if all(isinstance(s, int) for s in sizes) else args

    def _unflatten(self, args: Any) -> Any:
        tensor, dim, sizes = args
        return tensor, dim, tuple(self._fitting(list(sizes), (tensor.shape[dim],)))

    def _fitting(self, sizes: list[int], shape: Sequence[int]) -> list[int]:
        """Return the sizes with the one replaced that makes a tensor of this shape fit; unchanged where none does."""
        # Not the unchanged dims, usually batch and length: an error is better than another length.
        kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sizes, shape, strict=False)))
        if -1 in sizes:
            return [*sizes[:kept], *self._fitting_open(sizes[kept:])]
        numel = math.prod(shape)
        if math.prod(sizes) == numel:
            return sizes
        # Of the others the smallest multiple of the units first: a number of heads before a width.
        for index in sorted(range(kept, len(sizes)), key=lambda place: sizes[place]):
            local = self._local(sizes[index])
            if local is not None and math.prod(sizes[:index]) * local * math.prod(sizes[index + 1 :]) == numel:
                return [*sizes[:index], local, *sizes[index + 1 :]]
        return sizes

    def _fitting_open(self, sizes: list[int]) -> list[int]:
        """With a -1 every divisor fits: a size that equals the units becomes the shard's, else the sizes stay."""
        if sizes.count(self._num_units) == 1:
            index = sizes.index(self._num_units)
            return [*sizes[:index], self._own, *sizes[index + 1 :]]
        return sizes

    def _split(self, args: Any, kwargs: Any) -> Any:
        tensor, sizes, *rest = args
        dim = kwargs.get("dim", rest[0] if rest else 0)
        have = tensor.shape[dim]
        if isinstance(sizes, int):
            local = self._local(sizes)
            # Equal parts of a whole tensor become equal parts of the shard.
            fits = (local is not None and local > 0 and have % local == 0 and have % sizes != 0) or self._is_own(
                have, sizes
            )
            return (tensor, local, *rest) if fits else args
        locals_ = [self._local(size) for size in sizes]
        fits = sum(sizes) != have and None not in locals_ and sum(size or 0 for size in locals_) == have
        return (tensor, locals_, *rest) if fits else args

    def _is_own(self, have: int, size: int) -> bool:
        """Tell whether `have` is this rank's part of two parts of `size` or more."""
        local = self._local(size)
        return local is not None and local > 0 and local != size and have % local == 0 and have // local in (2, 3)

    def _expand(self, args: Any) -> Any:
        tensor, *rest = args
        sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else list(rest)
        lead = len(sizes) - tensor.dim()
        for place, have in enumerate(tensor.shape):
            wanted = sizes[lead + place]
            if have not in (1, wanted) and wanted != -1 and self._local(wanted) == have:
                sizes[lead + place] = have
        return (tensor, *sizes)

    def _item(self, tensor: Tensor, index: Any) -> Any:
        return tensor, self._translated(tensor, index)

    def _translated(self, tensor: Tensor, index: Any) -> Any:
        items = list(index) if isinstance(index, tuple) else [index]
        if not all(item is Ellipsis or isinstance(item, slice) for item in items):
            return index
        lead = tensor.dim() - sum(item is not Ellipsis for item in items)
        # Parts of one dim are taken apart alone; several dims at once are an image without its padding.
        is_alone = sum(isinstance(item, slice) and item != slice(None) for item in items) == 1
        dim = 0
        for place, item in enumerate(items):
            if item is Ellipsis:
                dim += lead
                continue
            items[place] = self._bounds(item, tensor.shape[dim], is_alone=is_alone)
            dim += 1
        return tuple(items)

    def _bounds(self, item: slice, have: int, *, is_alone: bool) -> slice:
        """Return the shard's bounds of a slice whose bounds are those of full groups and exceed the tensor."""
        bounds = [bound for bound in (item.start, item.stop) if isinstance(bound, int) and bound > 0]
        if item.step is not None or not bounds:
            return item
        locals_ = {bound: self._local(bound) for bound in bounds}
        # A width of the whole tensor is at least as large as one of the bounds only where the shard is cut.
        if None in locals_.values() or have % max(self._own, 1) or max(bounds) * self._own % self._num_units:
            return item
        if not any(bound > have for bound in bounds) and not (is_alone and self._is_own(have, bounds[0])):
            return item
        return slice(locals_.get(item.start, item.start), locals_.get(item.stop, item.stop))
