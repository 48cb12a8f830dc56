"""Descriptions of transformers' models: tiny ones against real runs, and GPT-2 and Llama beside `ModelSpec.transformer`."""

from __future__ import annotations

import functools

import pytest
import torch

import meshwright as mw
from meshwright.describe.describing import describe_model
from meshwright.plan.catalogue.catalogue import builder_of
from unit.describe.measured import growth, kept_by_layers

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": ("LlamaConfig", {**LLAMA, "num_key_value_heads": 2}),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 4}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}),
}


def build(name: str):
    config, sizes = CONFIGS[name]
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **sizes))


def batch_of(num_samples: int, *, with_mask: bool = False):
    ids = torch.arange(num_samples * 8).reshape(num_samples, 8) % 64
    mask = {"attention_mask": torch.ones_like(ids)} if with_mask else {}
    return {"input_ids": ids, "labels": ids, **mask}


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_kept_bytes_are_those_of_a_real_run(name: str, with_mask: bool) -> None:
    make_batch = functools.partial(batch_of, with_mask=with_mask)
    spec = describe_model(functools.partial(build, name), make_batch(2))
    assert kept_by_layers(spec) == growth(build(name), make_batch)
    assert spec.num_params == sum(parameter.numel() for parameter in build(name).parameters())
    assert (spec.num_heads, spec.hidden_size, spec.vocab_size, spec.sequence_length) == (4, 32, 64, 8)
    assert not any("for real" in note for note in spec.notes)


def test_a_full_mask_leaves_attention_causal() -> None:
    spec = describe_model(functools.partial(build, "llama"), batch_of(2, with_mask=True))
    block = next(layer for layer in spec.layers if layer.name == "model.layers.0")
    assert [op.causal for op in block.operators if op.is_core] == [True]
    assert spec.num_kv_heads == 2


def test_experts_have_their_share_of_the_rows() -> None:
    spec = describe_model(functools.partial(build, "mixtral"), batch_of(2))
    block = next(layer for layer in spec.layers if layer.name == "model.layers.0")
    experts = [op for op in block.operators if op.kind == "matmul" and op.name == "mlp.experts"]
    assert [(op.count, op.rows, op.inner, op.columns) for op in experts] == [(4, 4, 32, 128), (4, 4, 64, 32)]
    attention = 2 * 8 * (2 * 32 * 32 + 2 * 32 * 16) + 4 * 8 * 8 * 32
    assert block.forward_flops == attention + 2 * 8 * 32 * 4 + 2 * (2 * 8) * 3 * 32 * 64


def test_tied_embeddings_are_shared() -> None:
    spec = describe_model(functools.partial(build, "gpt2"), batch_of(2))
    (shared,) = spec.shared
    assert shared.layers == ("transformer.wte", "lm_head")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"kv_heads": 2, "intermediate": 64, "gated": True}),
        ("gpt2", {"tied": True}),
    ],
)
def test_the_sizes_alone_give_the_same_parameters_and_flops(name: str, changes: dict) -> None:
    described = describe_model(functools.partial(build, name), batch_of(2))
    length = 16 if name == "gpt2" else 8  # rows of learned positions
    made = mw.ModelSpec.transformer(layers=2, hidden=32, heads=4, vocab=64, sequence=length, **changes)
    assert described.num_params == made.num_params
    if length == 8:
        assert described.forward_flops == made.forward_flops


WORDS = {"vocab_size": 64, "max_position_embeddings": 16}
BLOCKS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
IN_BLOCKS = {"layers": 2, "hidden": 32, "heads": 4, "intermediate": 48}
FAMILIES = {
    "bert": (
        "BertForPreTraining",
        "BertConfig",
        {**BLOCKS, **WORDS},
        {**IN_BLOCKS, "vocab": 64, "positions": 16, "sequence": 8},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**BLOCKS, "image_size": 8, "patch_size": 2, "num_labels": 5},
        {**IN_BLOCKS, "image": 8, "patch": 2, "classes": 5},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{
                "d_model": 32,
                "d_kv": 6,
                "d_ff": 48,
                "num_layers": 2,
                "num_heads": 4,
                "vocab_size": 64,
                "use_cache": False,
            },
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
        {**IN_BLOCKS, "head_size": 6, "vocab": 64, "sequence": 8, "targets": 4},
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"depths": [2, 1], "hidden_sizes": [256, 512], "num_labels": 5},
        {"depths": [2, 1], "block": "bottleneck", "image": 32, "classes": 5},
    ),
    "latent_experts": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **{
                **BLOCKS,
                "num_hidden_layers": 3,
                "num_key_value_heads": 4,
                "first_k_dense_replace": 1,
                "use_cache": False,
            },
            **{"vocab_size": 64, **LATENT, **EXPERTS},
        },
        {
            **{**IN_BLOCKS, "layers": 3, "dense_layers": 1, "query_rank": 12, "latent_rank": 8, "plain_head_size": 8},
            **{
                "rotary_head_size": 4,
                "value_head_size": 8,
                "expert_intermediate": 16,
                "experts": 8,
                "experts_per_token": 2,
            },
            **{"shared_experts": 1, "vocab": 64, "sequence": 8},
        },
    ),
}


def batch_of_family(name: str):
    ids = torch.zeros(2, 8, dtype=torch.int64)
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.zeros(2, 3, *([8, 8] if name == "vit" else [32, 32])), "labels": ids[:, 0]}
    if name == "t5":
        return {"input_ids": ids, "labels": ids[:, :4]}
    return {"input_ids": ids, "labels": ids} | ({"next_sentence_label": ids[:, 0]} if name == "bert" else {})


@pytest.mark.parametrize("name", FAMILIES)
def test_known_families_have_the_parameters_and_flops_of_transformers(name: str) -> None:
    model, config, theirs, ours = FAMILIES[name]
    made = builder_of(name)(name=name, **ours)
    settings = getattr(transformers, config)(**theirs)
    described = describe_model(lambda: getattr(transformers, model)(settings), batch_of_family(name))
    assert made.num_params == described.num_params
    assert made.forward_flops == pytest.approx(described.forward_flops, rel=1e-3)
