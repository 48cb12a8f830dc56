"""Encoders and encoder-decoders from their sizes: BERT, ViT and T5."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import ConfigError
from meshwright.spec.layer import LayerSpec, SharedParameter
from meshwright.spec.layer_operators import LayerOperators, numbered, require_sizes
from meshwright.spec.model import ModelSpec

__all__: list[str] = []


def bert(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    vocab: int,
    sequence: int,
    positions: int,
    types: int = 2,
    element_bytes: int = 4,
) -> ModelSpec:
    """Return BERT with both heads of its pre-training: masked words, and whether two sentences follow each other.

    Source:
        Devlin et al. 2018, arXiv:1810.04805, section 3; parameters as `BertForPreTraining` of transformers has them.
    """
    _require(
        name,
        {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "intermediate": intermediate,
            "vocab": vocab,
            "sequence": sequence,
            "positions": positions,
            "types": types,
            "element_bytes": element_bytes,
        },
    )
    stack = _Stack(rows=sequence, width=hidden, heads=heads, inner=intermediate, element_bytes=element_bytes)
    embedding = stack.operators()
    embedding.elementwise("words", 2 * hidden, "inner", num_params=vocab * hidden)
    embedding.elementwise("positions", 3 * hidden, "rows", num_params=positions * hidden)
    embedding.elementwise("types", 3 * hidden, "rows", num_params=types * hidden)
    stack.norm(embedding, "norm")
    block = stack.operators()
    stack.attention(block)
    stack.norm(block, "norm1")
    stack.mlp(block)
    stack.norm(block, "norm2")
    head = stack.operators()
    head.product("pooler", hidden, hidden, bias=True, rows=1, saved=hidden)
    head.product("next_sentence", hidden, 2, bias=True, rows=1, saved=2)
    head.product("transform", hidden, hidden, bias=True, saved=hidden)
    head.elementwise("activation", 2 * hidden, saved=hidden)
    stack.norm(head, "norm")
    head.product("decoder", hidden, vocab, "columns", saved=vocab, num_params=vocab * hidden + vocab)
    head.loss(vocab)
    table = _tied(("embedding.words", "head.decoder"), ("embedding", "head"), vocab * hidden, element_bytes)
    return ModelSpec(
        name=name,
        layers=(
            embedding.layer("embedding"),
            *numbered(block.layer("blocks"), layers),
            head.layer("head", output_bytes=sequence * vocab * element_bytes),
        ),
        shared=(table,),
        sequence_length=sequence,
        num_heads=heads,
        num_kv_heads=heads,
        hidden_size=hidden,
        vocab_size=vocab,
    )


def vit(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    image: int,
    patch: int,
    classes: int,
    channels: int = 3,
    element_bytes: int = 4,
) -> ModelSpec:
    """Return a vision transformer for square images of ``image`` pixels in patches of ``patch``, with a class token.

    Source:
        Dosovitskiy et al. 2020, arXiv:2010.11929, section 3.1; parameters as `ViTForImageClassification` of transformers.
    """
    _require(
        name,
        {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "intermediate": intermediate,
            "image": image,
            "patch": patch,
            "classes": classes,
            "channels": channels,
            "element_bytes": element_bytes,
        },
    )
    patches = (image // patch) ** 2
    stack = _Stack(rows=patches + 1, width=hidden, heads=heads, inner=intermediate, element_bytes=element_bytes)
    embedding = stack.operators()
    pixels = channels * patch**2
    embedding.product("patches", pixels, hidden, bias=True, rows=patches, saved=pixels)
    embedding.elementwise("positions", 3 * hidden, num_params=(patches + 2) * hidden)  # with the class token itself
    block = stack.operators()
    stack.norm(block, "norm1")
    stack.attention(block)
    stack.norm(block, "norm2")
    stack.mlp(block)
    head = stack.operators()
    stack.norm(head, "norm")
    head.product("classifier", hidden, classes, bias=True, rows=1, saved=classes)
    head.loss(classes, rows=1)
    return ModelSpec(
        name=name,
        layers=(
            embedding.layer("embedding"),
            *numbered(block.layer("blocks"), layers),
            head.layer("head", output_bytes=classes * element_bytes),
        ),
        num_heads=heads,
        num_kv_heads=heads,
        hidden_size=hidden,
    )


def t5(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    head_size: int,
    intermediate: int,
    vocab: int,
    sequence: int,
    targets: int,
    buckets: int = 32,
    element_bytes: int = 4,
) -> ModelSpec:
    """Return T5, with as many blocks in the encoder as in the decoder and one table for both and the head.

    The encoder's result, which all blocks of the decoder read, is sent to a later stage once; it is not part of what each block
    hands on.

    Source:
        Raffel et al. 2019, arXiv:1910.10683, section 2.1; parameters as `T5ForConditionalGeneration` of transformers has them.
    """
    require_sizes(
        name,
        {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "head_size": head_size,
            "intermediate": intermediate,
            "vocab": vocab,
            "sequence": sequence,
            "targets": targets,
            "buckets": buckets,
            "element_bytes": element_bytes,
        },
    )
    sizes = {"width": hidden, "heads": heads, "head_size": head_size, "inner": intermediate}
    reads = _Stack(rows=sequence, element_bytes=element_bytes, is_plain=True, **sizes)
    writes = _Stack(rows=targets, element_bytes=element_bytes, is_plain=True, **sizes)
    table = vocab * hidden
    found: list[LayerSpec] = []
    for part, stack in (("encoder", reads), ("decoder", writes)):
        embedding = stack.operators()
        embedding.elementwise("words", 2 * hidden, "inner", num_params=table)
        found.append(embedding.layer(f"{part}.embedding"))
        for index in range(layers):
            block = stack.operators()
            stack.norm(block, "norm1")
            # The first block of each has the table of relative positions, whose rows all blocks add to their scores.
            bias_params = buckets * heads if index == 0 else 0
            stack.attention(block, bias_params=bias_params)
            if part == "decoder":
                stack.norm(block, "norm2")
                stack.attention(block, keys=sequence)
            stack.norm(block, "norm_mlp")
            stack.mlp(block)
            if part == "encoder" and index == layers - 1:
                stack.norm(block, "norm")
            found.append(block.layer(f"{part}.{index}"))
    head = writes.operators()
    writes.norm(head, "norm")
    head.product("head", hidden, vocab, "columns", saved=vocab)
    head.loss(vocab)
    found.append(head.layer("head", output_bytes=targets * vocab * element_bytes))
    holders = ("encoder.embedding", "decoder.embedding", "head")
    return ModelSpec(
        name=name,
        layers=tuple(found),
        shared=(_tied(holders, holders, table, element_bytes),),
        sequence_length=sequence,
        num_heads=heads,
        num_kv_heads=heads,
        hidden_size=hidden,
        vocab_size=vocab,
    )


def _require(name: str, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError where a size is none, or heads do not divide the width."""
    require_sizes(name, sizes)
    hidden, heads = sizes["hidden"], sizes["heads"]
    if hidden % heads:
        raise ConfigError(
            f"{name}: hidden={hidden} with heads={heads} (rule: heads divide hidden)",
            fix=f"hidden={-(-hidden // heads) * heads}",
        )


class _Stack:
    """Parts of equal blocks; a plain one has no biases, norms without a mean, and scores that are kept."""

    def __init__(
        self,
        *,
        rows: int,
        width: int,
        heads: int,
        inner: int,
        element_bytes: int,
        head_size: int | None = None,
        is_plain: bool = False,
    ) -> None:
        self._rows, self._width, self._heads, self._inner = rows, width, heads, inner
        self._element_bytes = element_bytes
        self._head_size = width // heads if head_size is None else head_size
        self._is_plain = is_plain

    def operators(self) -> LayerOperators:
        return LayerOperators(rows=self._rows, width=self._width, element_bytes=self._element_bytes)

    def norm(self, to: LayerOperators, name: str) -> None:
        num_params = self._width if self._is_plain else 2 * self._width
        to.elementwise(name, 2 * self._width, "rows", saved=2 * self._width, num_params=num_params)

    def attention(self, to: LayerOperators, *, keys: int | None = None, bias_params: int = 0) -> None:
        """Add attention to the own rows, or to ``keys`` rows of another stack."""
        query, has_bias = self._heads * self._head_size, not self._is_plain
        prefix = "" if keys is None else "cross_"
        if keys is None:
            to.product("qkv", self._width, 3 * query, "columns", saved=3 * query, bias=has_bias)
        else:
            to.product("cross_q", self._width, query, "columns", saved=query, bias=has_bias)
            to.product("cross_kv", self._width, 2 * query, "columns", saved=2 * query, bias=has_bias, rows=keys)
        if self._is_plain:
            if bias_params:
                scores = self._heads * self._rows
                to.elementwise("position_bias", 2 * scores, "inside", num_params=bias_params)
            to.scores(self._head_size, self._heads, keys=keys, prefix=prefix)
        else:
            to.attention(self._head_size, self._heads, causal=False, keys=keys)
        to.product(f"{prefix}projection", query, self._width, "inner", saved=query, bias=has_bias)
        to.elementwise(f"{prefix}residual", 3 * self._width, "rows")

    def mlp(self, to: LayerOperators) -> None:
        has_bias = not self._is_plain
        to.product("mlp_in", self._width, self._inner, "columns", saved=self._inner, bias=has_bias)
        to.elementwise("activation", 2 * self._inner, "inside", saved=self._inner)
        to.product("mlp_out", self._inner, self._width, "inner", bias=has_bias)
        to.elementwise("mlp_residual", 3 * self._width, "rows")


def _tied(names: tuple[str, ...], layers: tuple[str, ...], num_params: int, element_bytes: int) -> SharedParameter:
    return SharedParameter(names=names, layers=layers, num_params=num_params, params_bytes=num_params * element_bytes)
