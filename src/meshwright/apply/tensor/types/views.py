"""Rules of functions that only move entries: they are linear, and a shard stays one unless its sharded dim is split."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.apply.tensor.types.lattice import PARTIAL, RefusedError, Type, shard
from meshwright.apply.tensor.types.operation import Operation, chosen, normal, words

__all__: list[str] = []

VIEWS = words(
    """
    view reshape view_as reshape_as flatten unflatten ravel permute transpose t T mT H mH adjoint swapaxes
    swapdims movedim moveaxis unsqueeze squeeze expand expand_as broadcast_to tile repeat repeat_interleave
    split chunk tensor_split split_with_sizes unbind narrow select unsafe_chunk unsafe_split flip diagonal
    unfold pixel_shuffle pixel_unshuffle channel_shuffle rot90 as_strided hsplit vsplit dsplit atleast_1d
    atleast_2d atleast_3d
    """
)

JOINS = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"])

EXPANSIONS = frozenset(["expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile"])
"""Of a replicated tensor they give a part where they are told this rank's size: every entry is the same."""

_UNSAFE = frozenset(
    ["unfold", "as_strided", "diagonal", "rot90", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"]
)
_PICKS = frozenset(["select", "flip"])


def view(op: Operation) -> list[Type]:
    """Follow a view by the shapes that the whole run saw."""
    terms = op.linear() if op.name not in ("expand_as", "view_as", "reshape_as") else None
    if terms is not None:
        return terms
    first = op.args[0]
    own = op.type(first)
    if own.kind == "partial":
        return op.all(PARTIAL)
    if own.kind == "replicated":  # the other operand gave its shape
        return _expanded(op)
    if op.name in _UNSAFE:
        raise RefusedError(f"no rule for {op.name} of {own}")
    if op.name in _PICKS and own.dim in chosen(op.argument(1, "dim", "dims", default=0), first.dim()):
        raise RefusedError(f"picks entries by their place in the sharded dim {own.dim}")
    return op.by_shapes()


def _expanded(op: Operation) -> list[Type]:
    return [
        shard(dims[0]) if len(dims := op.differing(index)) == 1 else Type("replicated")
        for index in range(len(op.outputs))
    ]


def roll(op: Operation) -> list[Type]:
    """Follow a rotation along other dims."""
    terms = op.linear()
    if terms is not None:
        return terms
    own = op.type(op.args[0])
    dims: Any = op.argument(2, "dims")
    if dims is None or own.dim in chosen(dims, op.args[0].dim()):
        raise RefusedError(f"rolls along the sharded dim {own.dim}")
    return op.all(own)


def join(op: Operation) -> list[Type]:
    """Follow concatenations and stacks."""
    terms = op.linear()
    if terms is not None:
        return terms
    found = op.by_shapes()
    parts: list[Tensor] = [item for item in op.args[0] if item.numel() or item.dim() > 1]
    if op.name == "stack":
        at = normal(op.argument(1, "dim", default=0), op.outputs[0].dim())
        wanted = {shard(dim - (dim > at)) for dim in (kind.dim for kind in found) if dim is not None and dim != at}
        if len(wanted) != 1:
            raise RefusedError(f"stacks {op.told()} along the sharded dim")
    else:
        wanted = set(found)
    for part in parts:
        if op.type(part) not in wanted:
            raise RefusedError(f"joins {op.told()}: parts with what is not one")
    return found


def pad(op: Operation) -> list[Type]:
    """Follow F.pad, except along the sharded dim."""
    first, widths = op.args[0], list(op.argument(1, "pad"))
    value = op.argument(3, "value", default=0)
    own = op.type(first)
    if own.kind == "partial":
        if value not in (None, 0) or op.argument(2, "mode", default="constant") != "constant":
            op.refuse_partial()
        return op.all(PARTIAL)
    place = first.dim() - 1 - (own.dim or 0)
    if any(widths[2 * place : 2 * place + 2]):
        raise RefusedError(f"pads along the sharded dim {own.dim}")
    return op.all(own)


def triangle(op: Operation) -> list[Type]:
    """Follow tril and triu: over the last two dims."""
    own = op.type(op.args[0])
    if own.dim is not None and own.dim >= op.args[0].dim() - 2:
        raise RefusedError(f"takes the place in the sharded dim {own.dim} for a number")
    return op.all(own)
