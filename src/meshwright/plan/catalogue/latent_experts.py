"""Decoders with latent attention and many small experts from their sizes: DeepSeek-V2 and V3."""

from __future__ import annotations

import dataclasses

from meshwright.spec.layer import LayerSpec
from meshwright.spec.layer_operators import LayerOperators, numbered, require_sizes
from meshwright.spec.model import ModelSpec

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Sizes of a decoder with latent attention."""

    layers: int
    dense_layers: int
    hidden: int
    heads: int
    query_rank: int
    latent_rank: int
    plain_head_size: int
    rotary_head_size: int
    value_head_size: int
    intermediate: int
    expert_intermediate: int
    experts: int
    experts_per_token: int
    shared_experts: int
    vocab: int
    sequence: int
    element_bytes: int = 4


def latent_experts(*, name: str, **sizes: int) -> ModelSpec:
    """Return a decoder whose keys and values come from one narrow vector a token, with dense blocks first, then experts.

    Args:
        name: What to call it.
        sizes: The sizes: ``layers``, of which ``dense_layers`` have one MLP of ``intermediate``; in the others
            ``experts_per_token`` of ``experts`` and ``shared_experts`` more, of ``expert_intermediate`` each. Queries pass
            ``query_rank``, keys and values ``latent_rank`` elements; a head's scores take ``plain_head_size`` and
            ``rotary_head_size`` elements, its values ``value_head_size``.

    Source:
        DeepSeek-AI 2024, arXiv:2412.19437, section 2.1 and 4.2, without the module that predicts one more token; parameters as
        `DeepseekV3ForCausalLM` of transformers has them.
    """
    require_sizes(name, sizes)
    shape = _Shape(**sizes)
    dense = _block(shape, has_experts=False).layer("blocks")
    sparse = _block(shape, has_experts=True).layer("blocks")
    blocks = [*numbered(dense, shape.dense_layers), *numbered(sparse, shape.layers)[shape.dense_layers :]]
    return ModelSpec(
        name=name,
        layers=(_embedding(shape), *blocks, _head(shape)),
        sequence_length=shape.sequence,
        num_heads=shape.heads,
        num_kv_heads=shape.heads,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
    )


def _operators(shape: _Shape) -> LayerOperators:
    return LayerOperators(rows=shape.sequence, width=shape.hidden, element_bytes=shape.element_bytes)


def _norm(to: LayerOperators, name: str, width: int) -> None:
    to.elementwise(name, 2 * width, "rows", saved=2 * width, num_params=width)


def _embedding(shape: _Shape) -> LayerSpec:
    operators = _operators(shape)
    operators.elementwise("embedding", 2 * shape.hidden, "inner", num_params=shape.vocab * shape.hidden)
    return operators.layer("embedding")


def _block(shape: _Shape, *, has_experts: bool) -> LayerOperators:
    operators = _operators(shape)
    _norm(operators, "norm1", shape.hidden)
    _attention(shape, operators)
    _norm(operators, "norm2", shape.hidden)
    if has_experts:
        operators.product("router", shape.hidden, shape.experts, saved=shape.experts)
        wide = shape.expert_intermediate
        _mlp(shape, operators, "expert", wide, experts=shape.experts, passes=shape.experts_per_token)
        _mlp(shape, operators, "shared", shape.shared_experts * wide)
        operators.elementwise("combine", (shape.experts_per_token + 2) * shape.hidden, "rows")
    else:
        _mlp(shape, operators, "mlp", shape.intermediate)
    operators.elementwise("residual2", 3 * shape.hidden, "rows")
    return operators


def _attention(shape: _Shape, operators: LayerOperators) -> None:
    head = shape.plain_head_size + shape.rotary_head_size
    queries, values = shape.heads * head, shape.heads * shape.value_head_size
    latent = shape.latent_rank + shape.rotary_head_size
    keys = shape.heads * (shape.plain_head_size + shape.value_head_size)
    operators.product("q_down", shape.hidden, shape.query_rank, saved=shape.query_rank)
    _norm(operators, "q_norm", shape.query_rank)
    operators.product("q_up", shape.query_rank, queries, "columns", saved=queries)
    operators.product("kv_down", shape.hidden, latent, saved=latent)
    _norm(operators, "kv_norm", shape.latent_rank)
    operators.product("kv_up", shape.latent_rank, keys, "columns", saved=keys)
    operators.elementwise("rotary", 2 * shape.rotary_head_size * (shape.heads + 1), "inside")
    # Scores take ``head`` elements a product and values fewer; one kernel with their mean has the same arithmetic.
    operators.attention((head + shape.value_head_size) // 2, shape.heads, causal=True)
    operators.product("projection", values, shape.hidden, "inner", saved=values)
    operators.elementwise("residual1", 3 * shape.hidden, "rows")


def _mlp(shape: _Shape, operators: LayerOperators, name: str, wide: int, *, experts: int = 1, passes: int = 1) -> None:
    operators.experts(
        f"{name}_in", shape.hidden, 2 * wide, "columns", saved=2 * wide, experts=experts, passes=passes, bias=False
    )
    operators.elementwise(f"{name}_activation", passes * 3 * wide, "inside", saved=passes * 2 * wide)
    operators.experts(f"{name}_out", wide, shape.hidden, "inner", saved=0, experts=experts, passes=passes, bias=False)


def _head(shape: _Shape) -> LayerSpec:
    operators = _operators(shape)
    _norm(operators, "norm", shape.hidden)
    operators.product("head", shape.hidden, shape.vocab, "columns", saved=shape.vocab)
    operators.loss(shape.vocab)
    return operators.layer("head", output_bytes=shape.sequence * shape.vocab * shape.element_bytes)
