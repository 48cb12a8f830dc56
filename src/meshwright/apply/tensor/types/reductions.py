"""Rules of functions over all entries of a dim: sums, norms, softmax, sorting. Over a sharded dim only a sum can be right."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.apply.tensor.types.lattice import PARTIAL, VARYING, RefusedError, Type, shard
from meshwright.apply.tensor.types.operation import Operation, chosen, words
from meshwright.apply.tensor.types.pointwise import pointwise

__all__: list[str] = []

# Function -> (position of its dim among the arguments, its default dim; None is all of them).
REDUCTIONS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        words(
            """
    sum nansum mean nanmean amax amin prod all any std var max min argmax argmin median nanmedian logsumexp var_mean
    std_mean aminmax count_nonzero softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp
    """
        ),
        (1, None),
    ),
    **dict.fromkeys(["sort", "argsort", "msort", "mode"], (1, -1)),
    **dict.fromkeys(["topk", "kthvalue", "diff"], (2, -1)),
    **dict.fromkeys(["norm", "linalg_norm", "linalg_vector_norm", "quantile"], (2, None)),
    "normalize": (2, 1),
    "glu": (1, -1),
}
_LINEAR = {"sum", "nansum", "mean", "cumsum", "diff"}
_SUMS = {"sum", "nansum"}
_NAMES = ("dim", "axis")


def reduction(op: Operation) -> list[Type]:
    """Follow a function over some dims."""
    first: Any = op.argument(0, "input", "self")
    place, default = REDUCTIONS[op.name]
    dims: Any = op.argument(place, *_NAMES, default=default)
    if op.name in ("max", "min") and isinstance(op.argument(1, "other", *_NAMES), Tensor):
        return pointwise(op)
    if op.name in ("std", "var") and isinstance(dims, bool):
        dims = None
    own = op.type(first)
    if op.has("varying"):
        return op.all(VARYING)
    if own.kind == "partial":
        if op.name not in _LINEAR:
            op.refuse_partial()
        return op.all(PARTIAL)
    return _over(op, own, chosen(dims, first.dim()), first.dim())


def _over(op: Operation, own: Type, dims: set[int], num_dims: int) -> list[Type]:
    if own.dim is None:
        raise RefusedError(f"takes {op.told()}")
    if own.dim in dims:
        if op.name in _SUMS:
            return op.all(PARTIAL)
        if op.name == "glu":
            return op.by_shapes()
        raise RefusedError(f"goes over the sharded dim {own.dim}, of which each rank has a part")
    if op.outputs[0].dim() == num_dims:
        return op.all(own)
    return op.all(shard(own.dim - sum(dim < own.dim for dim in dims)))


def last_dims(op: Operation) -> list[Type]:
    """Follow layer_norm and rms_norm: over the last dims, with weights in their shape."""
    op.refuse_partial()
    first = op.args[0]
    own = op.type(first)
    op.refuse_others(first)
    if own.dim is not None and own.dim >= first.dim() - len(op.argument(1, "normalized_shape")):
        raise RefusedError(f"goes over the sharded dim {own.dim}, of which each rank has a part")
    return op.all(own)


def weight_norm(op: Operation) -> list[Type]:
    """Follow the normalisation of a weight with a size of its own for each entry of one dim."""
    op.refuse_partial()
    direction, size = op.args[:2]
    own, dim = op.type(direction), op.argument(2, "dim", default=0)
    if own.dim is None or own.dim != dim:
        raise RefusedError(f"takes {op.told()}: it goes over all dims but {dim}")
    if op.type(size) != own:
        raise RefusedError(f"takes sizes that are {op.type(size)} for a weight that is {own}")
    return op.all(own)


def channels(op: Operation) -> list[Type]:
    """Follow group_norm, batch_norm and instance_norm: channels with their own statistics and weights."""
    op.refuse_partial()
    first = op.args[0]
    own = op.type(first)
    if own.dim is None or own.dim > 1:
        raise RefusedError(f"takes {op.told()}: it goes over places that each rank has a part of")
    if own.dim == 0:
        op.refuse_others(first)
        if op.name == "batch_norm" and op.argument(5, "training", default=False):
            raise RefusedError("goes over the samples, of which each rank has a part")
        return op.all(own)
    for value in op.inputs:
        if value.tensor is not first and value.type != shard(0):
            raise RefusedError(f"takes a weight or a statistic that is {value.type} with channels in parts")
    if op.name == "group_norm":
        op.check_groups(1, "num_groups", first, 1)
    return op.all(own)


def places(op: Operation) -> list[Type]:
    """Follow pooling and interpolation, which go over places, not over samples or channels."""
    own = op.type(op.args[0])
    num_places = {"1d": 1, "2d": 2, "3d": 3}.get(op.name[-2:], op.args[0].dim() - 2)
    if own.kind == "partial" and op.name.startswith(("avg_pool", "adaptive_avg")):
        return op.all(PARTIAL)
    op.refuse_partial()
    if own.dim is None or own.dim >= op.args[0].dim() - num_places:
        raise RefusedError(f"takes {op.told()}: it goes over places that each rank has a part of")
    return op.all(own)


def loss(op: Operation) -> list[Type]:
    """Refuse losses: they reduce over everything."""
    raise RefusedError(f"is a loss over {op.told()}, of which each rank has a part")
