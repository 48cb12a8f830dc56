"""Rules of indexing: a sharded dim must be taken in full, since its indices are not the whole's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.apply.tensor.types.lattice import PARTIAL, RefusedError, Type, shard
from meshwright.apply.tensor.types.operation import Operation, normal, words

__all__: list[str] = []

VALUE_SHAPED = words(
    """
    nonzero argwhere masked_select unique unique_consecutive bincount histc histogram masked_scatter
    unique_dim searchsorted bucketize one_hot
    """
)
"""Their result's shape, or what its entries mean, follows from all values."""


def embedding(op: Operation) -> list[Type]:
    """Follow a look-up: with sharded ids, or in a table with sharded columns."""
    ids, table = op.args[0], op.argument(1, "weight", "indices")
    if ids.is_floating_point():  # torch.embedding has the arguments in the other order
        ids, table = table, ids
    of_ids, of_table = op.type(ids), op.type(table)
    if of_table.kind == "replicated" and of_ids.dim is not None:
        return op.all(of_ids)
    if of_table.dim == 1 and of_ids.kind == "replicated":
        return op.all(shard(op.outputs[0].dim() - 1))
    if of_table.kind == "partial" and of_ids.kind == "replicated":
        return op.all(PARTIAL)
    raise RefusedError(f"looks up ids that are {of_ids} in a table that is {of_table}")


def item(op: Operation) -> list[Type]:
    """Follow x[...]."""
    first, index = op.args[0], op.args[1]
    own = op.type(first)
    indices = list(_tensors(index))
    if any(op.type(tensor).kind in ("partial", "varying") for tensor in indices):
        raise RefusedError(f"picks by numbers that are not whole: {op.told()}")
    if any(tensor.dtype == torch.bool and op.type(tensor).kind != "replicated" for tensor in indices):
        raise RefusedError("has as many entries as a mask says that is not replicated")
    if own.kind in ("partial", "varying"):
        if any(op.type(tensor).kind != "replicated" for tensor in indices):
            raise RefusedError(f"picks by {op.told()}")
        return op.all(own)
    if own.dim is not None:
        full = next(value.full[own.dim] for value in op.inputs if value.tensor is first)
        _check_index(index, own.dim, first, full)
        if any(op.type(tensor).kind == "shard" for tensor in indices):
            raise RefusedError(f"picks by {op.told()}")
    return op.by_shapes()


def _check_index(index: Any, sharded: int, tensor: Tensor, full: int | None = None) -> None:
    """Refuse numbers, lists and tensors along the sharded dim; the proof takes a slice for this rank's.

    Args:
        index: What stands in the brackets.
        sharded: The sharded dim.
        tensor: This rank's part.
        full: Size of the whole one along that dim, where it may be taken in steps: parts that begin at a whole step.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(
        part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1
        for part in parts
        if part is not None and part is not Ellipsis
    )
    dim = 0
    for part in parts:
        if part is None:
            continue
        if part is Ellipsis:
            dim += tensor.dim() - taken
            continue
        width = part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1
        if dim <= sharded < dim + width:
            if not isinstance(part, slice):
                raise RefusedError(f"picks entries by their number in the sharded dim {sharded}")
            if part.step not in (None, 1) and not _is_by_steps(part, tensor.shape[sharded], full):
                raise RefusedError(f"picks every {part.step}th entry of the sharded dim {sharded}")
        dim += width


def _is_by_steps(part: slice, own: int, full: int | None) -> bool:
    """Tell whether every n-th entry of a part is that of the whole: gates and their values that lie in turns."""
    step = part.step
    fits = full is not None and step > 0 and own % step == 0 and full % step == 0
    return fits and part.stop is None and 0 <= (part.start or 0) < step


def gather(op: Operation) -> list[Type]:
    """Follow gather, take_along_dim and index_select."""
    first, dim, index = op.args[0], op.argument(1, "dim"), op.argument(2, "index", "indices")
    if op.name == "take_along_dim":
        dim, index = op.argument(2, "dim"), op.argument(1, "indices")
    own, by = op.type(first), op.type(index)
    if by.kind in ("partial", "varying") or dim is None:
        raise RefusedError(f"picks by numbers that are {by}")
    if own.kind == "partial":
        if by.kind != "replicated":
            raise RefusedError(f"picks by {op.told()}")
        return op.all(PARTIAL)
    if own.dim == normal(dim, first.dim()):
        raise RefusedError(f"picks entries by their number in the sharded dim {own.dim}")
    return op.by_shapes()


def put(op: Operation) -> list[Type]:
    """Follow writes into a tensor: scatter, scatter_add, index_add, index_copy, index_fill and x[...] = y."""
    first = op.args[0]
    if op.name == "setitem":
        return _set(op)
    dim, index = op.argument(1, "dim"), op.argument(2, "index")
    source: Any = op.argument(3, "src", "source", "tensor", "value")
    own, by, new = op.type(first), op.type(index), op.type(source)
    if by.kind in ("partial", "varying"):
        raise RefusedError(f"writes at numbers that are {by}")
    kinds = {kind for kind in (own, new) if not kind.is_zero}
    if PARTIAL in kinds:
        number = isinstance(source, Tensor) or source == 0
        if kinds != {PARTIAL} or by.kind != "replicated" or not number:
            raise RefusedError(f"writes {new} into {own}")
        return op.all(PARTIAL)
    sharded = {kind.dim for kind in (own, new, by) if kind.dim is not None}
    if normal(dim, first.dim()) in sharded or len(sharded) != 1:
        raise RefusedError(f"writes {new} into {own}, at numbers in the dim {dim}")
    return op.by_shapes() if op.outputs[0] is not first else op.all(own)


def _set(op: Operation) -> list[Type]:
    first, index, source = op.args[0], op.args[1], op.args[2]
    own, new = op.type(first), op.type(source)
    if any(op.type(tensor).kind != "replicated" for tensor in _tensors(index)):
        raise RefusedError(f"writes where {op.told()} say")
    if own.kind == "partial" or new.kind == "partial":
        if not isinstance(source, Tensor) and source != 0:
            op.refuse_partial()
        op.linear() if isinstance(source, Tensor) and not tuple(_tensors(index)) else None
        return [PARTIAL]
    if own.dim is not None:
        _check_index(index, own.dim, first)
        if new.kind == "replicated" and isinstance(source, Tensor) and source.dim() and source.numel() != 1:
            _check_source(own.dim, first, source)
        return [own]
    if new.kind != "replicated":
        raise RefusedError(f"writes {new} into {own}")
    return [own]


def copy(op: Operation) -> list[Type]:
    """Follow x.copy_(y), often into a slice of x: y has x's parts, or the same entry for all of them."""
    first, source = op.args[0], op.args[1]
    own, new = op.type(first), op.type(source)
    if "varying" in (own.kind, new.kind):
        raise RefusedError(f"writes {new} into {own}")
    if "partial" in (own.kind, new.kind):
        op.linear()
        return [PARTIAL]
    if own.dim is None or new.dim is None:
        if own.dim is None:
            raise RefusedError(f"writes {new} into {own}")
        _check_source(own.dim, first, source)
    elif own.dim - first.dim() != new.dim - source.dim():
        raise RefusedError(f"writes {new} into {own}, along another dim")
    return [own]


def _check_source(sharded: int, first: Tensor, source: Tensor) -> None:
    place = sharded - first.dim() + source.dim()
    if place >= 0 and source.shape[place] != 1:
        raise RefusedError("writes a replicated tensor into a part")


def _tensors(index: Any) -> list[Tensor]:
    return [part for part in (index if isinstance(index, (tuple, list)) else [index]) if isinstance(part, Tensor)]


def refuse_value_shape(op: Operation) -> list[Type]:
    """Refuse a result whose number of entries depends on values."""
    raise RefusedError(f"takes {op.told()}, and what it gives depends on all values: each rank's would be another")
