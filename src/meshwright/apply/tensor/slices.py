"""Tensor in slices over the ranks that acts as a whole one: logits of a cut vocabulary, the stream between layers.

Gathering such a tensor costs more than the layer that made it, and its next use may not need it. Cross-entropy computes on slices
of logits, a layer on slices of the stream. So it stays in slices while it is only reshaped along other dims and then given to one
of those. Any other use gathers it first, once. So all code is right, and the common code is fast. It is the only tensor subclass
at run time, and it never enters a layer.

[Note: gradients] Code that asks for the gradient of such a tensor (a hook, `retain_grad`, `torch.autograd.grad`) gets the whole
gradient of all uses, earlier ones too: the parts of the ranks' slices are gathered.

[Note: gathered for good] Once gathered, a tensor and all views of it stay whole. Code may hold a view of the gathered tensor and
write into it (`logits[..., n:] = -1e9`), which the slices would not see. Earlier views are taken again, of the whole tensor, so
that memory is shared as on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright._torch_private import without_function_subclasses
from meshwright.apply.tensor.data_alias import DataAlias
from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import gather_from_group
from meshwright.errors import ApplyError
from meshwright.nn.cross_entropy import vocab_parallel_cross_entropy
from meshwright.trees import map_tensors

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
    torch.Tensor.__hash__,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_sparse", "requires_grad", "grad_fn", "is_leaf")),
}


class Slices(Tensor):
    """A whole tensor of which this rank has one slice along a dim. Made by `Slices.of`."""

    local: Tensor
    """This rank's slice, with its graph; what it holds counts while `is_in_slices`."""
    group: Communicator
    cut_dim: int
    """Where the slices lie, counted from 0."""
    sizes: tuple[int, ...]
    """Every rank's size along it."""
    _whole: Tensor | None
    _parent: Slices | None
    """The tensor that this one is a view of, by `_retake`; None for one with memory of its own."""
    _retake: Callable[[Tensor], Tensor]
    _version_when_gathered: int
    _kept_gradient: Tensor | None
    """What `grad` gives after `retain_grad`."""
    _is_taken: bool
    """Whether something has computed with the slice."""
    _aliases: list[DataAlias]
    """Of it and its views: what `data` has given."""

    @staticmethod
    def of(local: Tensor, group: Communicator, dim: int, sizes: Sequence[int]) -> Slices:
        """Return the tensor with the slice `local`, with its graph, on this rank; `sizes` are every rank's along the dim."""
        dim, sizes = dim % local.dim(), tuple(sizes)
        if local.requires_grad and torch.is_grad_enabled():
            made: Slices = _Wrap.apply(local, group, dim, sizes)  # pyright: ignore[reportAssignmentType]
        else:
            made = _wrapper(local, dim, sizes)
        made.local, made.group, made.cut_dim, made.sizes = local, group, dim, sizes
        made._whole = made._parent = made._kept_gradient = None
        made._aliases, made._is_taken = [], False
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Slices(shape={tuple(self.shape)}, dim={self.cut_dim}, sizes={self.sizes})"

    @property
    def is_in_slices(self) -> bool:
        """Whether `local` is still valid; see [Note: gathered for good]."""
        is_ours = self._whole is None and (self._parent is None or self._parent.is_in_slices)
        return is_ours and not self._is_of_a_function

    @property
    def _is_of_a_function(self) -> bool:
        """Whether a user's autograd.Function returned it: it has that function's graph, and what it holds has none."""
        return self.requires_grad and not self.local.requires_grad

    def local_to_use(self) -> Tensor:
        """Return this rank's slice, to compute with it."""
        self._note_taken()
        return self.local

    def _note_taken(self) -> None:
        self._is_taken = True
        if self._parent is not None:
            self._parent._note_taken()

    def gathered(self) -> Tensor:
        """Return the plain, whole tensor. Every rank of the group calls this together."""
        whole = self._put_together()
        for alias in self._aliases:
            alias.is_used()
        return whole

    def _put_together(self) -> Tensor:
        if self._whole is None and self._is_of_a_function:
            with torch.enable_grad():
                self._whole = whole = cast("Tensor", _Rejoined.apply(self))
            self._version_when_gathered = whole._version
        if self._whole is None:
            # With its graph in any case: the first use may be without gradients, to log a norm.
            with torch.set_grad_enabled(self.local.requires_grad or torch.is_grad_enabled()):
                if self._parent is None:
                    self._whole = gather_from_group(self.local, self.group, dim=self.cut_dim, sizes=self.sizes)
                else:
                    self._whole = self._retake(self._parent.gathered())
            self._version_when_gathered = 0 if self._whole.is_inference() else self._whole._version
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
        if func is torch.autograd.grad:
            return _gradients(*args, **kwargs)
        if func in _OF_GRADIENT and isinstance(first, Slices) and first._has_gradient_of_all_uses(func):
            return getattr(first, _OF_GRADIENT[func])(*args[1:], **kwargs)
        if isinstance(first, Slices) and first.is_in_slices:
            kept = first._kept_in_slices(func, args, kwargs)
            if kept is not None:
                return kept
        return func(*make_whole(args), **make_whole(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Below autograd, inside a user's autograd.Function: values are enough, the gradient goes to `_Wrap`.
        if func._schema.is_mutable:
            sizes = next(item.sizes for item in args if isinstance(item, Slices))
            raise ApplyError(
                f"{func} writes over a tensor that lies in slices on {len(sizes)} ranks, inside an autograd.Function",
                fix="clone the tensor before it is given to the function",
            )
        return func(*plain_values(args), **plain_values(kwargs or {}))

    # -- its gradient -------------------------------------------------------------------------------------------

    def _has_gradient_of_all_uses(self, func: Callable[..., Any]) -> bool:
        """Tell whether the slices' gradient covers all uses; if the whole was written over since, the whole's gradient counts."""
        if self._is_of_a_function:
            return False
        if self.is_in_slices:
            return True
        if self._parent is None:
            whole = self.gathered()
            return whole.is_inference() or whole._version == self._version_when_gathered
        if not self.requires_grad or func not in (torch.Tensor.register_hook, torch.Tensor.retain_grad):
            return False
        raise ApplyError(
            f"{getattr(func, '__name__', func)}() on a view of a tensor that lies in slices on {len(self.sizes)} ranks, after "
            "the tensor was put together: some uses of the view have a gradient of their own",
            fix="call it right after the view is taken, or on the tensor itself",
        )

    def _hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        def on_slice(gradient: Tensor) -> Tensor | None:
            changed = hook(self._whole_gradient(gradient))
            return None if changed is None else self._own_part(changed)

        return self.local.register_hook(on_slice)

    def _whole_gradient(self, gradient: Tensor) -> Tensor:
        return gather_from_group(gradient, self.group, dim=self.cut_dim, sizes=self.sizes)

    def _own_part(self, whole: Tensor) -> Tensor:
        rank = self.group.group_rank
        return whole.narrow(self.cut_dim, sum(self.sizes[:rank]), self.sizes[rank])

    def _retain_gradient(self) -> None:
        def keep(gradient: Tensor) -> None:
            kept = self._kept_gradient
            self._kept_gradient = gradient.clone() if kept is None else kept + gradient

        self._hook(keep)

    def _gradient(self) -> Tensor | None:
        return self._kept_gradient

    def _data(self) -> Tensor:
        data = self._put_together().data
        if self.local.requires_grad and not data.is_inference():
            alias = DataAlias(data, is_used=self._is_taken)
            self._aliases.append(alias)
            self.local.register_hook(alias.refuse_writes)
        return data

    # -- what needs no gathering --------------------------------------------------------------------------------

    def _kept_in_slices(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func in _CASTS and not any(isinstance(value, Tensor) for value in args[1:]):
            return self._like(func, args, kwargs, func(self.local, *args[1:], **kwargs), self.cut_dim)
        if func in _RESHAPES and self.cut_dim == self.dim() - 1:
            return self._reshaped(func, args, kwargs)
        if func is torch.Tensor.flatten or func is torch.flatten:
            return self._flattened(func, args, kwargs)
        if func is torch.Tensor.__getitem__:
            return self._item(func, args)
        if func is F.cross_entropy:
            return self._cross_entropy(*args[1:], **kwargs)
        return None

    def _like(self, func: Callable[..., Any], args: Any, kwargs: Any, local: Tensor, dim: int) -> Slices:
        """Return the result of a function that keeps the slices apart; `args` are those of the whole tensor."""
        if local is self.local:
            return self
        made = Slices.of(local, self.group, dim, self.sizes)
        if not local._is_view():
            self._note_taken()
        else:
            made._parent = self
            made._aliases = self._aliases
            made._retake = lambda whole: func(whole, *args[1:], **kwargs)
        return made

    def _reshaped(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        sizes = args[1:]
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
        local = self.local.reshape(*shape[:-1], self.local.shape[-1])
        return self._like(func, args, kwargs, local, len(shape) - 1)

    def _flattened(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0) % self.dim()
        end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1) % self.dim()
        if start <= self.cut_dim <= end:
            return None
        moved = self.cut_dim - (end - start) if self.cut_dim > end else self.cut_dim
        return self._like(func, args, kwargs, self.local.flatten(start, end), moved)

    def _item(self, func: Callable[..., Any], args: Any) -> Any:
        """Keep `x[..., :-1, :]` and the like in slices: plain slices that take everything along the cut dim."""
        index = args[1]
        items = list(index) if isinstance(index, tuple) else [index]
        if not all(item is Ellipsis or isinstance(item, slice) for item in items) or items.count(Ellipsis) > 1:
            return None
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items[at : at + 1] = [slice(None)] * (self.dim() - len(items) + 1)
        if len(items) > self.cut_dim and items[self.cut_dim] != slice(None):
            return None
        return self._like(func, args, {}, self.local[tuple(items)], self.cut_dim)

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
        local = self.local_to_use() if classes_last else self.local_to_use().movedim(1, -1)
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


_OF_GRADIENT = {
    torch.Tensor.register_hook: "_hook",
    torch.Tensor.retain_grad: "_retain_gradient",
    torch.Tensor.grad.__get__: "_gradient",  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    torch.Tensor.data.__get__: "_data",  # pyright: ignore[reportAttributeAccessIssue]
}


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the results of torch.autograd.grad for whole tensors."""
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    sliced = [
        isinstance(tensor, Slices) and tensor._has_gradient_of_all_uses(torch.Tensor.register_hook) for tensor in inputs
    ]
    given = [
        tensor.local if is_sliced else make_whole(tensor) for tensor, is_sliced in zip(inputs, sliced, strict=True)
    ]
    found = torch.autograd.grad(make_whole(outputs), given, *make_whole(args), **make_whole(kwargs))
    return tuple(
        tensor._whole_gradient(gradient) if is_sliced and gradient is not None else gradient
        for tensor, gradient, is_sliced in zip(inputs, found, sliced, strict=True)
    )


class _Wrap(torch.autograd.Function):
    """The edge between a slice and the tensor that acts as a whole, for code that only autograd sees: a gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Communicator, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.arguments = (sum(sizes[: group.group_rank]), dim, sizes[group.group_rank])
        return _wrapper(local, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        start, dim, size = ctx.arguments
        return gradients[0].narrow(dim, start, size), None, None, None


class _Rejoined(torch.autograd.Function):
    """Whole values with the graph of the tensor in slices that they belong to."""

    @staticmethod
    def forward(ctx: Any, sliced: Slices) -> Tensor:  # noqa: ARG004
        return gather_from_group(sliced.local, sliced.group, dim=sliced.cut_dim, sizes=sliced.sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return gradients[0]


def _wrapper(local: Tensor, dim: int, sizes: Sequence[int]) -> Slices:
    shape = list(local.shape)
    shape[dim] = sum(sizes)
    return Tensor._make_wrapper_subclass(Slices, shape, dtype=local.dtype, device=local.device)


def plain_values(tree: Any) -> Any:
    """Return arguments with whole values, without a graph, for tensors in slices, which stay as they are."""

    def values(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Slices):
            return tensor
        if not tensor.is_in_slices:
            return tensor.gathered().detach()
        return gather_from_group(tensor.local.detach(), tensor.group, dim=tensor.cut_dim, sizes=tensor.sizes)

    return map_tensors(tree, values)


def make_whole(tree: Any) -> Any:
    """Return a tensor, or containers, with every tensor in slices gathered."""
    if type(tree) is Tensor:  # most calls, of which there are several in each layer
        return tree
    return map_tensors(tree, lambda tensor: tensor.gathered() if isinstance(tensor, Slices) else tensor)
