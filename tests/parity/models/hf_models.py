"""Hugging Face's models as they are shipped, from small random configurations, without dropout and in float64.

Sizes do not divide by 2 or 3 where the architecture leaves the choice; heads are 4, and 6 in T5. Everything of
`transformers` is imported inside the builders: importing it takes seconds, in each process that does so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.parity.models.hf_float64 import in_float64
from torch import nn

VOCABULARY = 101
MODULES = tuple(
    f"transformers.models.{name}.modeling_{name}"
    for name in ("albert", "bert", "gpt2", "llama", "mixtral", "t5", "vit")
)
"""What the builders import."""

NUM_CLASSES = 5

# What most of these configurations share. A standard deviation of 0.3 keeps these few features far from linear.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "intermediate_size": 13,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 11,
    "initializer_range": 0.3,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


_LOSSES = "transformers.loss.loss_utils"


def _builder(make: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    """Have a builder's models computed in float64: their weights, their code (`hf_float64.py`), and the own loss."""

    @functools.wraps(make)
    def build() -> nn.Module:
        model: Any = make(_Library()).double()
        if model.loss_type is not None:
            model.loss_function = in_float64(_LOSSES).LOSS_MAPPING[model.loss_type]
        return model

    return build


class _Library:
    """`transformers`, with models whose code is that of the copies; configurations are the same."""

    def __getattr__(self, name: str) -> Any:
        import transformers

        found = getattr(transformers, name)
        return getattr(in_float64(found.__module__), name) if found.__module__ in MODULES else found


def _llama(hf: Any, *, tied: bool) -> nn.Module:
    config = hf.LlamaConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=6,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="eager",
    )
    return hf.LlamaForCausalLM(config)


@_builder
def build_llama(hf: Any) -> nn.Module:
    """4 heads over 2 key heads, rotary positions, a head of its own."""
    return _llama(hf, tied=False)


@_builder
def build_tied_llama(hf: Any) -> nn.Module:
    """The same with the embedding's weight as head."""
    return _llama(hf, tied=True)


@_builder
def build_gpt2(hf: Any) -> nn.Module:
    """Linear layers stored transposed (Conv1D), query, key and value in one of them, a tied head."""
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=11,
        n_embd=20,
        n_layer=2,
        n_head=4,
        n_inner=13,
        bos_token_id=None,  # by default tokens beyond so small a vocabulary
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.3,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return hf.GPT2LMHeadModel(config)


@_builder
def build_bert(hf: Any) -> nn.Module:
    """A masked language model with padding masks, whose tied head has a bias under two names."""
    return hf.BertForMaskedLM(hf.BertConfig(**_SIZES, **_NO_DROPOUT, attn_implementation="sdpa"))


@_builder
def build_bert_classifier(hf: Any) -> nn.Module:
    """A pooled first token and a classifier."""
    return hf.BertForSequenceClassification(
        hf.BertConfig(**_SIZES, **_NO_DROPOUT, num_labels=NUM_CLASSES, attn_implementation="eager")
    )


@_builder
def build_t5(hf: Any) -> nn.Module:
    """Encoder and decoder with 6 heads of 5; one embedding for both and the head; position biases of the first layers."""
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=20,
        d_kv=5,
        d_ff=13,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=6,
        relative_attention_num_buckets=7,
        relative_attention_max_distance=11,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="eager",
    )
    return hf.T5ForConditionalGeneration(config)


@_builder
def build_vit(hf: Any) -> nn.Module:
    """Images of 9 x 9 in 9 patches, a class token and positions that are parameters without a module of their own."""
    sizes = {name: size for name, size in _SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = hf.ViTConfig(
        **sizes, **_NO_DROPOUT, image_size=9, patch_size=3, num_labels=NUM_CLASSES, attn_implementation="sdpa"
    )
    return hf.ViTForImageClassification(config)


@_builder
def build_mixtral(hf: Any) -> nn.Module:
    """4 experts of which each token takes 2; what an expert gets, the data decides, and it may be nothing."""
    config = hf.MixtralConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return hf.MixtralForCausalLM(config)


@_builder
def build_albert(hf: Any) -> nn.Module:
    """One layer that runs three times, a factorised embedding, and a tied head."""
    config = hf.AlbertConfig(
        **{**_SIZES, "num_hidden_layers": 3},
        **_NO_DROPOUT,
        embedding_size=7,
        num_hidden_groups=1,
        attn_implementation="eager",
    )
    return hf.AlbertForMaskedLM(config)
