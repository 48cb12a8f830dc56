"""Products among torch's operators: sizes of matrix products, convolutions, attention and recurrent layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from meshwright import _torch_private
from meshwright.spec.operator import OperatorKind

__all__: list[str] = []

_ATEN = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a product over the whole batch.

    Args:
        kind: "matmul" where ``weight`` is a parameter, which the caller decides; "attention" where it is fused.
        rows: Rows of the first factor; queries [elements].
        inner: The size that is summed over; the head's size [elements].
        columns: Columns of the second factor; keys [elements].
        count: Products [count].
        flops: Arithmetic; a multiply-add is 2, and a causal mask leaves out nothing [FLOPs].
        causal: Attention with a causal mask.
        factors: Its two factors; the second is the weight of layers that have one. Empty once they are not needed.
        num_keys: Key heads of all samples, in attention [count].
        is_plain: Whether the search for a tensor layout knows it as a product of data with a weight.
        input_size: Elements of the data where rows overlap, as in a convolution; 0 where they are rows x inner x count.
    """

    kind: OperatorKind
    rows: int
    inner: int
    columns: int
    count: int
    flops: int
    factors: tuple[Tensor, ...]
    causal: bool = False
    num_keys: int = 0
    is_plain: bool = True
    input_size: int = 0


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by the names of its schema, defaults included."""
    schema = func._schema.arguments
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found.update(zip((argument.name for argument in schema), args, strict=False))
    found.update(kwargs)
    return found


def products_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[Sizes, ...]:
    """Return the products that a call of an operator consists of; none where it is no product."""
    read = _READERS.get(func)
    return () if read is None else tuple(size for size in read(arguments_of(func, args, kwargs), result) if size.flops)


def _matrix(first: Tensor, second: Tensor) -> tuple[Sizes]:
    *batch, rows, inner = first.shape
    columns, count = second.shape[-1], math.prod(batch)
    return (
        Sizes(
            kind="batched_matmul",
            rows=rows,
            inner=inner,
            columns=columns,
            count=count,
            flops=2 * rows * inner * columns * count,
            factors=(first, second),
        ),
    )


def _of_mm(given: dict[str, Any], _: Any) -> tuple[Sizes]:
    return _matrix(given["self"], given["mat2"])


def _of_addmm(given: dict[str, Any], _: Any) -> tuple[Sizes]:
    return _matrix(given["mat1"], given["mat2"])


def _of_baddbmm(given: dict[str, Any], _: Any) -> tuple[Sizes]:
    return _matrix(given["batch1"], given["batch2"])


def _of_linear(given: dict[str, Any], _: Any) -> tuple[Sizes]:
    data, weight = given["input"], given["weight"]
    return _matrix(data.reshape(-1, data.shape[-1]), weight.t())


def _of_grouped_mm(given: dict[str, Any], result: Tensor) -> tuple[Sizes]:
    first, second = given["self"], given["mat2"]
    inner, columns = first.shape[-1], second.shape[-1]
    count = second.shape[0] if second.dim() == 3 else result.shape[0]
    rows = -(-first.shape[0] // count) if first.dim() == 2 and second.dim() == 3 else first.shape[-2]
    all_rows = first.shape[0] if first.dim() == 2 and second.dim() == 3 else rows * count
    return (
        Sizes(
            kind="batched_matmul",
            rows=rows,
            inner=inner,
            columns=columns,
            count=count,
            flops=2 * all_rows * inner * columns,
            factors=(first, second),
            is_plain=False,
        ),
    )


def _of_convolution(given: dict[str, Any], result: Tensor) -> tuple[Sizes]:
    data, weight, groups = given["input"], given["weight"], given["groups"]
    around = math.prod(weight.shape[2:])
    if given["transposed"]:
        rows, inner, columns = (
            data.shape[0] * math.prod(data.shape[2:]),
            weight.shape[0] // groups,
            weight.shape[1] * around,
        )
    else:
        rows, inner = result.shape[0] * math.prod(result.shape[2:]), weight.shape[1] * around
        columns = weight.shape[0] // groups
    return (
        Sizes(
            kind="batched_matmul",
            rows=rows,
            inner=inner,
            columns=columns,
            count=groups,
            flops=2 * rows * inner * columns * groups,
            factors=(data, weight),
            is_plain=groups == 1,
            input_size=data.numel(),
        ),
    )


def _of_attention(given: dict[str, Any], _: Any) -> tuple[Sizes]:
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, rows, width = query.shape
    columns, value_width = key.shape[2], value.shape[3]
    return (
        Sizes(
            kind="attention",
            rows=rows,
            inner=(width + value_width) // 2,
            columns=columns,
            count=batch * heads,
            flops=2 * batch * heads * rows * columns * (width + value_width),
            factors=(query, key),
            causal=bool(given.get("is_causal")),
            num_keys=batch * key.shape[1],
        ),
    )


def _of_recurrence(given: dict[str, Any], _: Any) -> tuple[Sizes, ...]:
    data, hidden = given["input"], given["hidden_size"]
    steps, batch, width = data.shape
    gates = given["weight0"].shape[0]
    common: dict[str, Any] = {"kind": "batched_matmul", "columns": gates, "is_plain": False}
    return (
        Sizes(
            rows=steps * batch,
            inner=width,
            count=1,
            flops=2 * steps * batch * width * gates,
            factors=(data, given["weight0"]),
            **common,
        ),
        Sizes(
            rows=batch,
            inner=hidden,
            count=steps,
            flops=2 * steps * batch * hidden * gates,
            factors=(data, given["weight1"]),
            **common,
        ),
    )


_READERS: Final[dict[Any, Callable[[dict[str, Any], Any], tuple[Sizes, ...]]]] = {
    _ATEN.mm.default: _of_mm,
    _ATEN.bmm.default: _of_mm,
    _ATEN.addmm.default: _of_addmm,
    _ATEN.baddbmm.default: _of_baddbmm,
    _ATEN.linear.default: _of_linear,
    _ATEN.convolution.default: _of_convolution,
    _torch_private.GROUPED_MM: _of_grouped_mm,
    _torch_private.RNN_LAYER: _of_recurrence,
    **dict.fromkeys(_torch_private.ATTENTIONS, _of_attention),
}

LOOKUPS: Final = frozenset(
    {
        _ATEN.embedding.default,
        _ATEN.index_select.default,
        _ATEN.gather.default,
        _ATEN.index.Tensor,
        _ATEN.take.default,
        _ATEN.embedding_renorm_.default,
    }
)
"""Operators that read as much of their first tensor as they return."""

EMBEDDINGS: Final = frozenset({_ATEN.embedding.default})

SAVES_RESULT: Final = frozenset(
    {
        _ATEN._softmax.default,
        _ATEN._safe_softmax.default,
        _ATEN._log_softmax.default,
        *(_ATEN.tanh.default, _ATEN.tanh_.default, _ATEN.sigmoid.default, _ATEN.sigmoid_.default),
        *(_ATEN.relu.default, _ATEN.relu_.default, _ATEN.threshold.default, _ATEN.threshold_.default),
        *(_ATEN.exp.default, _ATEN.exp_.default, _ATEN.sqrt.default, _ATEN.rsqrt.default, _ATEN.reciprocal.default),
        *(_ATEN.elu_.default, _ATEN.leaky_relu_.default, _ATEN.hardtanh_.default, _ATEN.cumprod.default),
        *(_ATEN.native_dropout.default, _ATEN.native_layer_norm.default, _ATEN.native_batch_norm.default),
        *(_ATEN.native_group_norm.default, _ATEN.max_pool2d_with_indices.default),
        *(_ATEN.topk.default, _ATEN.sort.default, _torch_private.RNN_LAYER, *_torch_private.ATTENTIONS),
    }
)
"""Operators whose backward needs their own result. A tensor that the operator before made and the next one reads is kept by the
former only where that stands here."""
