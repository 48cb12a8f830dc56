"""Layers of a transformer from its sizes alone: an embedding, equal blocks, a head."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from meshwright.spec.layer import LayerSpec, SharedParameter
from meshwright.spec.operator import OperatorKind, OperatorSpec, Split
from meshwright.values import Problems

__all__: list[str] = []

_LOGITS_BYTES: Final = 4
"""Cross-entropy is computed in fp32 whatever the model's dtype is, by PyTorch and by Megatron [bytes]."""

_LOGITS_PASSES: Final = 9
"""Passes of cross-entropy's forward over the logits: to fp32, maximum, difference, exponential, sum, logarithm, and the
writes of three of them [count]. Source: Megatron-LM, core/tensor_parallel/cross_entropy.py, read 2026-11-24."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Sizes of a transformer; `ModelSpec.transformer` documents them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    sequence: int
    gated: bool
    tied: bool
    norm: Literal["layer", "rms"]
    bias: bool
    learned_positions: bool
    element_bytes: int
    fused_attention: bool
    causal: bool
    dropout: bool
    experts: int
    experts_per_token: int

    def __post_init__(self) -> None:
        problems = Problems("transformer")
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if field.type == "int":
                whole = isinstance(size, int) and not isinstance(size, bool)
                problems.require(whole and size >= 1, f"{field.name}={size!r} (rule: a whole number, at least 1)")
        problems.check()
        problems.require(
            self.heads % self.kv_heads == 0,
            f"heads={self.heads} with kv_heads={self.kv_heads} (rule: kv_heads divide heads)",
            fix=f"kv_heads={self.heads}",
        )
        problems.require(
            self.experts_per_token <= self.experts,
            f"experts_per_token={self.experts_per_token} of experts={self.experts} (rule: at most all of them)",
            fix=f"experts_per_token={self.experts}",
        )
        problems.check()

    @property
    def query(self) -> int:
        """Width of the queries [elements]."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Width of the keys, and of the values [elements]."""
        return self.kv_heads * self.head_size

    @property
    def first_width(self) -> int:
        """Width of the MLP's first product: twice the intermediate size where it is gated [elements]."""
        return (2 if self.gated else 1) * self.intermediate

    @property
    def norm_params(self) -> int:
        """Elements of one norm [count]."""
        return self.hidden if self.norm == "rms" else 2 * self.hidden


def transformer_layers(shape: TransformerShape) -> tuple[tuple[LayerSpec, ...], tuple[SharedParameter, ...]]:
    """Return the layers of a transformer, and its shared parameters."""
    table = shape.vocab * shape.hidden
    shared = (
        SharedParameter(
            names=("embedding.weight", "head.weight"),
            layers=("embedding", "head"),
            num_params=table,
            params_bytes=table * shape.element_bytes,
        ),
    )
    block = _block(shape)
    blocks = (dataclasses.replace(block, name=f"blocks.{index}") for index in range(shape.layers))
    return (_embedding(shape), *blocks, _head(shape)), shared if shape.tied else ()


class _Operators:
    """Operators in the order in which they are added, with their parameters and what they keep."""

    def __init__(self, shape: TransformerShape) -> None:
        self.shape = shape
        self.found: list[OperatorSpec] = []

    def product(self, name: str, columns: int, inner: int, split: Split, *, saved: int = 0) -> None:
        """Add a product with a weight, of which ``saved`` elements of a row are kept."""
        self.experts(name, columns, inner, split, saved=saved, experts=1, passes=1)

    def experts(
        self, name: str, columns: int, inner: int, split: Split, *, saved: int, experts: int, passes: int
    ) -> None:
        """Add a product with a weight of each expert; ``passes`` of them see a row, and share the rows evenly."""
        bias = columns if self.shape.bias else 0
        self.found.append(
            OperatorSpec(
                kind="matmul",
                name=name,
                rows=-(-self.shape.sequence * passes // experts),
                inner=inner,
                columns=columns,
                count=experts,
                split=split,
                saved_bytes=self.shape.sequence * passes * saved * self.shape.element_bytes,
                num_params=experts * (inner * columns + bias),
            )
        )

    def elementwise(self, name: str, traffic: int, split: Split, *, saved: int = 0, num_params: int = 0) -> None:
        """Add an operator that moves ``traffic`` elements of one row and keeps ``saved``."""
        width = self.shape.sequence * self.shape.element_bytes
        self.found.append(
            OperatorSpec(
                kind="elementwise",
                name=name,
                rows=self.shape.sequence,
                columns=self.shape.hidden,
                traffic_bytes=width * traffic,
                saved_bytes=width * saved,
                num_params=num_params,
                split=split,
            )
        )

    def core(self, kind: OperatorKind, name: str, inner: int, columns: int, *, saved_bytes: int = 0) -> None:
        """Add a product or an elementwise operator of the attention core, one for each head."""
        self.found.append(
            OperatorSpec(
                kind=kind,
                name=name,
                rows=self.shape.sequence,
                inner=inner,
                columns=columns,
                count=self.shape.heads,
                causal=self.shape.causal and kind == "attention",
                saved_bytes=saved_bytes,
                split="inside",
                is_core=True,
            )
        )

    def scores(self, name: str, traffic: float, saved: float) -> None:
        """Add a pass over the scores of all heads: ``traffic`` and ``saved`` in bytes for each score."""
        scores = self.shape.heads * self.shape.sequence**2
        self.found.append(
            OperatorSpec(
                kind="elementwise",
                name=name,
                rows=self.shape.sequence,
                columns=self.shape.hidden,
                traffic_bytes=round(scores * traffic),
                saved_bytes=round(scores * saved),
                split="inside",
                is_core=True,
            )
        )

    def layer(self, name: str, *, forward_flops: float, output_bytes: int) -> LayerSpec:
        """Return the layer of these operators."""
        num_params = sum(operator.num_params for operator in self.found)
        return LayerSpec(
            name=name,
            num_params=num_params,
            params_bytes=num_params * self.shape.element_bytes,
            forward_flops=forward_flops,
            output_bytes=output_bytes,
            activation_bytes=sum(operator.saved_bytes for operator in self.found),
            operators=tuple(self.found),
        )


def _embedding(shape: TransformerShape) -> LayerSpec:
    operators = _Operators(shape)
    positions = shape.sequence * shape.hidden if shape.learned_positions else 0
    operators.elementwise("embedding", 2 * shape.hidden, "inner", num_params=shape.vocab * shape.hidden)
    if positions:
        operators.elementwise("positions", 3 * shape.hidden, "rows", num_params=positions)
    return operators.layer("embedding", forward_flops=0.0, output_bytes=_stream_bytes(shape))


def _block(shape: TransformerShape) -> LayerSpec:
    operators = _Operators(shape)
    operators.elementwise("norm1", 2 * shape.hidden, "rows", saved=2 * shape.hidden, num_params=shape.norm_params)
    operators.product("qkv", shape.query + 2 * shape.key, shape.hidden, "columns", saved=shape.query + 2 * shape.key)
    if not shape.learned_positions:
        operators.elementwise("rotary", 2 * (shape.query + shape.key), "inside")
    _attention(shape, operators)
    operators.product("projection", shape.hidden, shape.query, "inner", saved=shape.query)
    _residual(shape, operators, "residual1")
    operators.elementwise("norm2", 2 * shape.hidden, "rows", saved=2 * shape.hidden, num_params=shape.norm_params)
    _mlp(shape, operators)
    _residual(shape, operators, "residual2")
    matrices = 2 * shape.hidden * (shape.query + shape.key) + shape.experts_per_token * shape.hidden * (
        shape.first_width + shape.intermediate
    )
    # A model's FLOPs are counted with the whole square of the scores, causal or not: MFU is defined so.
    flops = 2.0 * shape.sequence * matrices + 4.0 * shape.sequence**2 * shape.query
    return operators.layer("blocks", forward_flops=flops, output_bytes=_stream_bytes(shape))


def _attention(shape: TransformerShape, operators: _Operators) -> None:
    if shape.fused_attention:
        operators.core("attention", "attention", shape.head_size, shape.sequence)
        return
    size = shape.element_bytes
    operators.elementwise("heads", 2 * (shape.query + 2 * shape.key), "inside")
    operators.core("batched_matmul", "scores", shape.head_size, shape.sequence)
    operators.scores("softmax", 2 * size, size)
    if shape.dropout:
        operators.scores("attention_dropout", 2 * size + 1, size + 1)
    operators.core("batched_matmul", "values", shape.sequence, shape.head_size)
    operators.elementwise("merge", 2 * shape.query, "inside")


def _mlp(shape: TransformerShape, operators: _Operators) -> None:
    experts, passes = shape.experts, shape.experts_per_token
    if experts > 1:
        operators.product("router", experts, shape.hidden, "whole", saved=experts)
    wide, narrow = shape.first_width, shape.intermediate
    operators.experts("mlp_in", wide, shape.hidden, "columns", saved=wide, experts=experts, passes=passes)
    # A gate's activation is kept beside the product of the two.
    kept = (2 if shape.gated else 1) * narrow
    operators.elementwise("activation", passes * (wide + narrow), "inside", saved=passes * kept)
    operators.experts("mlp_out", shape.hidden, narrow, "inner", saved=0, experts=experts, passes=passes)


def _residual(shape: TransformerShape, operators: _Operators, name: str) -> None:
    operators.elementwise(name, 3 * shape.hidden, "rows")
    if shape.dropout:
        mask = shape.sequence * shape.hidden
        operators.found.append(
            OperatorSpec(
                kind="elementwise",
                name=f"{name}_dropout",
                rows=shape.sequence,
                columns=shape.hidden,
                traffic_bytes=mask,
                saved_bytes=mask,
                split="rows",
            )
        )


def _head(shape: TransformerShape) -> LayerSpec:
    operators = _Operators(shape)
    operators.elementwise("norm", 2 * shape.hidden, "rows", saved=2 * shape.hidden, num_params=shape.norm_params)
    operators.found.append(
        OperatorSpec(
            kind="matmul",
            name="head",
            rows=shape.sequence,
            inner=shape.hidden,
            columns=shape.vocab,
            split="columns",
            saved_bytes=shape.sequence * shape.vocab * shape.element_bytes,
            num_params=shape.vocab * shape.hidden,
        )
    )
    logits = shape.sequence * shape.vocab
    operators.found.append(
        OperatorSpec(
            kind="elementwise",
            name="loss",
            rows=shape.sequence,
            columns=1,
            traffic_bytes=_LOGITS_PASSES * _LOGITS_BYTES * logits,
            split="inside",
        )
    )
    return operators.layer(
        "head",
        forward_flops=2.0 * shape.sequence * shape.hidden * shape.vocab,
        output_bytes=logits * shape.element_bytes,
    )


def _stream_bytes(shape: TransformerShape) -> int:
    return shape.sequence * shape.hidden * shape.element_bytes
