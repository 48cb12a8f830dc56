"""Rules of elementwise functions: dims are matched from the right, as in broadcasting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwright.apply.tensor.types.lattice import PARTIAL, VARYING, RefusedError, Type, Typed, shard
from meshwright.apply.tensor.types.operation import Operation, mixing, words

__all__: list[str] = []

LINEAR = words(
    """
    add sub neg positive negative clone to float double half bfloat16 type type_as contiguous detach data
    requires_grad cpu cuda lift_fresh alias resolve_conj resolve_neg real imag conj rsub identity
    """
)
"""f(a) + f(b) = f(a + b)."""

SCALING = frozenset(["mul", "div", "multiply", "divide", "true_divide"])

NONLINEAR = words(
    """
    abs absolute exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal pow rpow float_power sin
    cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv sign sgn
    floor ceil round trunc fix frac clamp clip clamp_min clamp_max minimum maximum fmin fmax remainder fmod
    floordiv floor_divide rfloordiv mod rdiv rtruediv relu relu6 gelu silu mish elu selu celu leaky_relu
    hardtanh hardswish hardsigmoid hardshrink softshrink softplus softsign tanhshrink threshold logsigmoid
    rrelu prelu where eq ne lt le gt ge greater less greater_equal less_equal not_equal logical_and
    logical_or logical_not logical_xor and or xor not invert bitwise_and bitwise_or bitwise_not bitwise_xor
    lshift rshift isnan isinf isfinite isposinf isneginf nan_to_num masked_fill addcmul addcdiv lerp bool
    long int short byte hypot ldexp copysign xlogy sinc heaviside isclose polar complex view_as_complex
    view_as_real deg2rad rad2deg lgamma digamma i0 nextafter logaddexp logaddexp2 signbit mul_add gumbel
    """
)

FILLS = frozenset(["zeros_like", "ones_like", "full_like", "empty_like", "zero", "fill"])
"""One number throughout, in the shape of what it takes."""

DROPOUTS = frozenset(
    [
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "feature_dropout",
        "native_dropout",
    ]
)


def drops(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of the function of this name drops entries."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    is_training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return name in DROPOUTS and bool(is_training) and bool(kwargs.get("p", args[1] if len(args) > 1 else 0.5))


def pointwise(op: Operation) -> list[Type]:
    """Follow a function that keeps shapes, or broadcasts."""
    if op.name == "where" and len(op.args) == 1:
        raise RefusedError("has as many entries as the values say, of a tensor that is not replicated")
    if op.has("varying"):
        return op.all(VARYING)
    if op.has("partial"):
        return _of_terms(op)
    if op.name == "prelu" and op.args[1].numel() > 1:
        return _channels(op)
    return op.all(broadcast(op))


def _channels(op: Operation) -> list[Type]:
    own, slopes = op.type(op.args[0]), op.type(op.args[1])
    at = 1 if op.args[0].dim() > 1 else 0
    if (own.dim == at) != (slopes.dim == 0):
        raise RefusedError(f"takes {op.told()}: each channel has a slope of its own")
    return op.all(own)


def broadcast(op: Operation) -> Type:
    """Return the shard that all operands agree on, counted from the right; refuse those that do not agree."""
    num_dims = max(value.tensor.dim() for value in op.inputs)
    places = {value.type.dim - value.tensor.dim() for value in op.inputs if value.type.dim is not None}
    if len(places) != 1:
        raise RefusedError(f"meets parts along different dims: {op.told()}")
    (place,) = places
    for value in op.inputs:
        check_beside(value, place)
    return shard(place + num_dims)


def check_beside(value: Typed, place: int) -> None:
    """Refuse a replicated tensor that differs along the sharded dim; `place` is counted from the right."""
    if value.type.kind == "replicated" and value.tensor.dim() >= -place and value.full[place] != 1:
        size = value.full[place]
        raise RefusedError(f"meets a replicated tensor of {size} entries in the dim where the other is in parts")


def _of_terms(op: Operation) -> list[Type]:
    terms = [value for value in op.inputs if value.type.kind == "partial"]
    others = [value for value in op.inputs if value.type.kind != "partial"]
    if op.name in LINEAR:
        for value in others:
            if not value.type.is_zero:
                raise RefusedError(mixing(value))
        if op.name in ("add", "sub", "rsub") and any(_is_number(item) for item in op.args):
            raise RefusedError(
                "adds a number to a term of a sum (partial): over all ranks it would be added once for each"
            )
        return op.all(PARTIAL)
    is_scaled = op.name in SCALING and len(terms) == 1 and all(value.type.kind == "replicated" for value in others)
    if is_scaled and (op.name in ("mul", "multiply") or op.args[0] is terms[0].tensor):
        return op.all(PARTIAL)
    if op.name in ("where", "masked_fill"):
        return _masked(op)
    if op.name in DROPOUTS and not drops(op.name, op.args, op.kwargs):
        return op.all(PARTIAL)  # what it takes, as it is
    op.refuse_partial()
    return []


def _masked(op: Operation) -> list[Type]:
    """Follow a choice by a replicated mask among terms and zeros."""
    mask = op.args[0] if op.name == "where" else op.argument(1, "mask")
    rest = op.args[1:] if op.name == "where" else (op.args[0], op.argument(2, "value"))
    for item in rest:
        is_term = isinstance(item, Tensor) and (op.type(item) == PARTIAL or op.type(item).is_zero)
        if not is_term and not (isinstance(item, (int, float)) and item == 0):
            op.refuse_partial()
    if op.type(mask).kind != "replicated":
        raise RefusedError("chooses among terms of a sum (partial) by a mask that is not replicated")
    return op.all(PARTIAL)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value != 0


def cast(op: Operation) -> list[Type]:
    """Follow a cast; another tensor among the arguments only gives the dtype."""
    return op.all(op.type(op.args[0]))


def fill(op: Operation) -> list[Type]:
    """Follow a constant in the shape of another tensor."""
    kind = op.type(op.args[0])
    if kind.kind == "partial":
        if op.name in ("zeros_like", "zero"):
            return op.all(PARTIAL)
        return op.all(Type("replicated"))
    return op.all(kind)
