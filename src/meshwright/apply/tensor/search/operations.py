"""Torch functions classified by their use of a parameter: product, look-up, transposition, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright import _torch_private

__all__: list[str] = []

CONVOLUTIONS: Final = {torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d}
TRANSPOSED_CONVOLUTIONS: Final = {
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
}
LINEAR: Final = {F.linear, _torch_private.LINEAR}
EMBEDDINGS: Final = {F.embedding, torch.embedding}
DROPOUTS: Final = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.alpha_dropout,
}
SPLITS: Final = {torch.split, torch.Tensor.split, torch.split_with_sizes, torch.Tensor.split_with_sizes}
JOINS: Final = {torch.cat, torch.concat, torch.concatenate}
MATMULS: Final = {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
}
SWAPS: Final = {torch.transpose, torch.Tensor.transpose, torch.Tensor.swapaxes, torch.swapaxes}
SAME: Final = {
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.bfloat16,
    torch.Tensor.half,
    torch.Tensor.type,
    torch.Tensor.type_as,
    torch.Tensor.contiguous,
    torch.Tensor.clone,
}
ITEMS: Final = {torch.Tensor.__getitem__, torch.Tensor.select, torch.select}

ELEMENTWISE: Final = {
    "add",
    "radd",
    "iadd",
    "mul",
    "rmul",
    "imul",
    "sub",
    "rsub",
    "div",
    "truediv",
    "where",
    "expand",
    "cat",
}


def operands(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, Any, Any, int, int] | None:
    """Return (kind, data, weight, the weight's dim of the result's entries, its dim that is summed over) of a product."""
    values = [*args, *kwargs.values()]
    if len(values) < 2:
        return None
    if func in LINEAR:
        return "linear", values[0], kwargs.get("weight", values[1]), -2, -1
    if func in CONVOLUTIONS or func in TRANSPOSED_CONVOLUTIONS:
        is_turned = func in TRANSPOSED_CONVOLUTIONS
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        out_place, in_place = (1, 0) if is_turned else (0, 1)
        weight = kwargs.get("weight", values[1])
        return None if groups != 1 else ("conv", values[0], weight, out_place, in_place)
    if func is torch.einsum:
        return _einsum_operands(values)
    if func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        return ("embedding", args[1], args[0], -1, -2) if args[0].dim() == 2 and args[1].dtype != torch.bool else None
    if func in EMBEDDINGS:
        pair = (args[0], args[1]) if func is F.embedding else (args[1], args[0])
        return "embedding", *pair, -1, -2
    if func in (torch.addmm, torch.baddbmm) and len(args) >= 3:
        return "linear", args[1], args[2], -1, -2
    if func in MATMULS and isinstance(args[1], Tensor) and args[1].dim() >= 2:
        return "linear", args[0], args[1], -1, -2
    return None


def _einsum_operands(values: list[Any]) -> tuple[str, Any, Any, int, int] | None:
    """Return the operands of an einsum of data with a parameter; of several summed or kept dims, the weight's first."""
    equation, *rest = values
    given = [tensor for item in rest for tensor in (item if isinstance(item, (list, tuple)) else [item])]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(given) != 2:
        return None
    terms, _, result = equation.replace(" ", "").partition("->")
    data, weight = sorted(zip(given, terms.split(","), strict=True), key=lambda pair: isinstance(pair[0], nn.Parameter))
    kept = [place for place, letter in enumerate(weight[1]) if letter in result and letter not in data[1]]
    summed = [place for place, letter in enumerate(weight[1]) if letter in data[1] and letter not in result]
    return ("linear", data[0], weight[0], kept[0], summed[0]) if kept and summed else None


def draws(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Tell whether a call is a dropout, now or at another probability or mode: both may change between steps."""
    if func in DROPOUTS or func is F.multi_head_attention_forward:
        return True
    return func is F.scaled_dot_product_attention and ("dropout_p" in kwargs or len(args) > 4)


def counts_ids(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Tell whether a look-up also renormalises the vectors that it finds, or counts how often they occur."""
    if func is not F.embedding:
        return False
    max_norm = kwargs.get("max_norm", args[3] if len(args) > 3 else None)
    by_frequency = kwargs.get("scale_grad_by_freq", args[5] if len(args) > 5 else False)
    return max_norm is not None or bool(by_frequency)


def is_number(index: Any) -> bool:
    """Tell whether an index picks one entry of a dim."""
    return isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0 and index.dtype != torch.bool)


_PLACES_OF_RATES: dict[Callable[..., Any], int] = {
    F.scaled_dot_product_attention: 4,
    # The mode does not see what this one calls in turn.
    F.multi_head_attention_forward: 10,
}
"""Functions that drop out inside: where their argument `dropout_p` is."""


class WithoutDropout(TorchFunctionMode):
    """Makes dropout drop nothing: shards would draw other masks than the whole."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return args[0]
        place = _PLACES_OF_RATES.get(func)
        if place is not None:
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)
