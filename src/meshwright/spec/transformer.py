"""Layers of a transformer from its sizes alone: an embedding, equal blocks, a head."""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshwright.spec.layer import LayerSpec, SharedParameter
from meshwright.spec.layer_operators import LayerOperators, numbered, require_sizes
from meshwright.spec.operator import OperatorSpec
from meshwright.values import Problems

__all__: list[str] = []


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
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.type == "int"}
        require_sizes("transformer", sizes)
        problems = Problems("transformer")
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
    def norm_name(self) -> str:
        """Name of a norm among the operators."""
        return "rms_norm" if self.norm == "rms" else "norm"

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
    blocks = numbered(_block(shape), shape.layers)
    return (_embedding(shape), *blocks, _head(shape)), shared if shape.tied else ()


def _operators(shape: TransformerShape) -> LayerOperators:
    return LayerOperators(rows=shape.sequence, width=shape.hidden, element_bytes=shape.element_bytes)


def _embedding(shape: TransformerShape) -> LayerSpec:
    operators = _operators(shape)
    operators.elementwise("embedding", 2 * shape.hidden, "inner", num_params=shape.vocab * shape.hidden)
    if shape.learned_positions:
        operators.elementwise("positions", 3 * shape.hidden, "rows", num_params=shape.sequence * shape.hidden)
    return operators.layer("embedding")


def _block(shape: TransformerShape) -> LayerSpec:
    operators = _operators(shape)
    width = shape.query + 2 * shape.key
    operators.elementwise(
        f"{shape.norm_name}1", 2 * shape.hidden, "rows", saved=2 * shape.hidden, num_params=shape.norm_params
    )
    operators.product("qkv", shape.hidden, width, "columns", saved=width, bias=shape.bias)
    if not shape.learned_positions:
        operators.elementwise("rotary", 2 * (shape.query + shape.key), "inside")
    _attention(shape, operators)
    operators.product("projection", shape.query, shape.hidden, "inner", saved=shape.query, bias=shape.bias)
    _residual(shape, operators, "residual1")
    operators.elementwise(
        f"{shape.norm_name}2", 2 * shape.hidden, "rows", saved=2 * shape.hidden, num_params=shape.norm_params
    )
    _mlp(shape, operators)
    _residual(shape, operators, "residual2")
    matrices = 2 * shape.hidden * (shape.query + shape.key) + shape.experts_per_token * shape.hidden * (
        shape.first_width + shape.intermediate
    )
    # A model's FLOPs are counted with the whole square of the scores, causal or not: MFU is defined so.
    flops = 2.0 * shape.sequence * matrices + 4.0 * shape.sequence**2 * shape.query
    return operators.layer("blocks", forward_flops=flops)


def _attention(shape: TransformerShape, operators: LayerOperators) -> None:
    if shape.fused_attention:
        operators.attention(shape.head_size, shape.heads, causal=shape.causal)
        return
    operators.elementwise("heads", 2 * (shape.query + 2 * shape.key), "inside")
    operators.scores(shape.head_size, shape.heads, dropout=shape.dropout)
    operators.elementwise("merge", 2 * shape.query, "inside")


def _mlp(shape: TransformerShape, operators: LayerOperators) -> None:
    experts, passes = shape.experts, shape.experts_per_token
    if experts > 1:
        operators.product("router", shape.hidden, experts, "whole", saved=experts, bias=shape.bias)
    wide, narrow = shape.first_width, shape.intermediate
    bias = shape.bias
    operators.experts("mlp_in", shape.hidden, wide, "columns", saved=wide, experts=experts, passes=passes, bias=bias)
    # A gate's activation is kept beside the product of the two.
    kept = (2 if shape.gated else 1) * narrow
    operators.elementwise(
        "gate" if shape.gated else "activation", passes * (wide + narrow), "inside", saved=passes * kept
    )
    operators.experts("mlp_out", narrow, shape.hidden, "inner", saved=0, experts=experts, passes=passes, bias=bias)


def _residual(shape: TransformerShape, operators: LayerOperators, name: str) -> None:
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
    operators = _operators(shape)
    operators.elementwise(
        shape.norm_name, 2 * shape.hidden, "rows", saved=2 * shape.hidden, num_params=shape.norm_params
    )
    operators.product("head", shape.hidden, shape.vocab, "columns", saved=shape.vocab)
    operators.loss(shape.vocab)
    return operators.layer("head", output_bytes=shape.sequence * shape.vocab * shape.element_bytes)
