"""Tiny configurations, derived from the fields of a configuration class by their names and defaults.

As the model testers of `transformers` do by hand: few layers, narrow streams, small vocabularies. No architecture is named here.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, INNER, LAYERS = 99, 32, 4, 8, 40, 2
IMAGE, POSITIONS, EXPERTS = 32, 64, 4

_RULES: tuple[tuple[str, int], ...] = (
    (r"(char_|.*)vocab_size(_.*)?|vocabulary.*", VOCABULARY),
    (r"codebook_size|num_embeddings|num_codevectors_per_group", 2 * HIDDEN),
    (r"type_vocab_size", 2),
    (r"(.*_)?num_(experts|local_experts|routed_experts)|n_routed_experts|.*num_experts", EXPERTS),
    (r".*(num_experts_per_tok|experts_per_tok|moe_topk|moe_k|top_k_experts)", 2),
    (r"n_group|topk_group|num_expert_groups", 1),
    (r"n_groups|mamba_n_groups", 2),
    (r"rotary_dim", 4),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r".*(num_key_value_heads|num_kv_heads|n_head_kv|num_key_value_groups)", 2),
    (r".*(attention_heads|num_heads|n_heads?|_heads)", HEADS),
    (r"head_dim|.*_head_dim|d_kv|attention_head_size|key_dim|linear_head_dim|d_qkv", HEAD_DIM),
    (r".*(lora_rank|_rank)", 16),
    (
        r"(.*_)?(num_)?(hidden_|encoder_|decoder_|transformer_)?(layers|n_layer|blocks|depth)|n_layers?|num_.*_layers",
        LAYERS,
    ),
    (r".*(intermediate_size|ffn_dim|d_ff|inner_dim|mlp_dim|n_inner|d_inner)", INNER),
    (r".*(feedforward_dim|ffn_hidden_size|dim_feedforward)", INNER),
    (r".*(image_size|crop_size|img_size)", IMAGE),
    (
        r".*(max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|context_length)",
        POSITIONS,
    ),
    (r".*num_queries|num_query_tokens|num_object_queries|.*num_latents", 6),
    (r"sliding_window|attention_window|local_attention", 4),
    (r".*chunk_length", 3),
    (r"window_size", 2),
    (r"num_conv_pos_embedding_groups|groups|.*num_groups|upsample_groups", 2),
    (r"num_filters", 4),
    (r".*num_mel_bins|n_mels|mel_dim|feature_size", 16),
    (r"mamba_d_state|state_size|d_state", 8),
    (r"mamba_n_heads|.*mamba_num_heads|ssm_num_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 8),
    (r"(mamba_)?chunk_size|mamba_d_ssm", 4),
    (r".*(channels|hidden_size|d_model|n_embd|embed_dim|hidden_dim|width|embedding_size)", HIDDEN),
    (r".*(embedding_dim|projection_dim|hidden|dim|features|units)", HIDDEN),
    (r".*(_size|_dim)", HIDDEN),
)
_SMALL = 64
"""Values that no rule knows stay up to this."""
_KEPT = re.compile(
    r"(.*_)?(kernel_size|patch_size|num_channels|in_channels|input_channels|audio_channels|stride|padding|num_labels|in_chans"
    r"|merge_size|spatial_patch_size|output_stride|conv_kernel_dim|chunk_size_feed_forward|temporal_patch_size|num_frames"
    r"|conv_kernel|block_size|mamba_expand|conv_size|out_channels_rgb)"
)
_CAPPED = re.compile(r".*(layers|heads|channels|experts|depth|n_layer|blocks|n_head|size|dim|width)")


def tiny_int(name: str, value: int) -> int:
    """Return the tiny value of a field."""
    if _KEPT.fullmatch(name):
        return min(value, 8) if "patch_size" in name else value
    for pattern, size in _RULES:
        if re.fullmatch(pattern, name):
            return min(value, size) if value > 0 or size in (1, 2) else value
    if value > _SMALL and _CAPPED.fullmatch(name):
        return HIDDEN
    return value


def tiny_list(name: str, value: list[Any]) -> list[Any]:
    """Return a list of the same length: stages with one or two layers and few channels."""
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    if re.fullmatch(
        r"(.*_)?(depths?|num_block_repeats|n_attn_blocks|stage_num_blocks|block_sizes|numb_of_layers|blocks_per_stage)",
        name,
    ):
        return [min(item, 2 if index < 2 else 1) for index, item in enumerate(value)]
    if re.fullmatch(r".*(num_heads|attention_heads)(_per_stage)?", name):
        return [min(item, 2 ** min(index + 1, 2)) for index, item in enumerate(value)]
    if re.fullmatch(
        r".*(hidden_sizes|embed_dims?|_channels|conv_dim|tdnn_dim|widths|dims|_per_stage|channel_list)", name
    ):
        growing = len(set(value)) > 1
        if growing and value == sorted(value, reverse=True):
            return tiny_list(name, value[::-1])[::-1]
        return [min(item, 16 * 2 ** min(index, 2) if growing else 16) for index, item in enumerate(value)]
    if re.fullmatch(r".*(indexes|indices|hook_ids|out_features|extract_layers)", name):
        return [min(item, index % LAYERS) for index, item in enumerate(value)]
    if name == "mrope_section":
        return [2, 1, 1]
    if name == "image_size":
        return [IMAGE] * len(value)
    if name.endswith("patch_size") and max(value) > 8:
        return [8] * len(value)
    return value


class Tokens:
    """Ids of special tokens: small, and one for each name."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {
            "pad": 0,
            "bos": 1,
            "eos": 2,
            "decoder_start": 1,
            "forced_eos": 2,
            "forced_bos": 1,
            "sep": 2,
            "cls": 1,
        }

    def id_of(self, name: str) -> int:
        """Return the id of a field such as image_token_id."""
        key = re.sub(r"_(token_)?(id|index)$", "", name)
        if key not in self.ids:
            self.ids[key] = max(3, *self.ids.values()) + 1
        return self.ids[key]


def tiny_fields(cls: Any, tokens: Tokens | None = None, level: int = 0) -> dict[str, Any]:
    """Return the arguments of a tiny configuration of a class, those of its parts inside."""
    tokens = tokens or Tokens()
    found: dict[str, Any] = {}
    parts = dict(getattr(cls, "sub_configs_defaults", None) or {})
    for field in dataclasses.fields(cls):
        if field.name in parts or field.name.startswith("_"):
            continue
        value = field.default if field.default is not dataclasses.MISSING else None
        if value is None and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        new = tiny_value(field.name, value, tokens)
        if new != value:
            found[field.name] = new
    if isinstance(found.get("depths"), list) and found.get("image_size") == IMAGE:
        found["image_size"] = 2 * IMAGE  # four stages halve it, each with windows
    if "attention_types" in {field.name for field in dataclasses.fields(cls)}:
        found["attention_types"] = [[["global", "local"], LAYERS // 2]]
    if {"expand", "num_heads", "head_dim"} <= {field.name for field in dataclasses.fields(cls)}:
        found["head_dim"] = 2 * HIDDEN // HEADS  # heads of a state space share the widened stream
    _settle(found)
    for name, spec in parts.items():
        if level < 3 and (part := _tiny_part(spec, tokens, level)) is not None:
            found[name] = part
    return found


def tiny_value(name: str, value: Any, tokens: Tokens) -> Any:
    """Return the tiny value of any field."""
    if isinstance(value, bool) or value is None:
        return value
    if re.search(r"(drop|layerdrop|jitter|mask_time_prob|mask_feature_prob)", name) and isinstance(value, int | float):
        return type(value)(0)
    if re.search(r"_token_(id|index)$|^(mask|unk|lang)_(id|index)$", name):
        return (
            tokens.id_of(name) if isinstance(value, int) else [tokens.id_of(f"{name}{i}") for i, _ in enumerate(value)]
        )
    if isinstance(value, int):
        return tiny_int(name, value)
    if isinstance(value, list | tuple):
        return tiny_list(name, list(value)) if value else value
    if isinstance(value, dict):
        return {key: tiny_value(key, item, tokens) for key, item in value.items()}
    if name in ("initializer_range", "init_std") and isinstance(value, float):
        return 0.2
    return value


def _tiny_part(spec: Any, tokens: Tokens, level: int) -> dict[str, Any] | None:
    cls = _class_of(spec)
    if cls is None:
        return None
    fields = tiny_fields(cls, tokens, level + 1)
    for name, value in (spec.init_kwargs or {}).items():
        fields[name] = tiny_value(name, value, tokens)
    if cls.model_type:
        fields["model_type"] = cls.model_type
    _settle(fields)
    return fields


def _settle(fields: dict[str, Any]) -> None:
    """Have as many layers as there are layers whose results are taken, each taken once."""
    for name, value in fields.items():
        if not re.fullmatch(r"(.*_)?(out_indices|out_features|hidden_state_indices)", name) or not isinstance(
            value, list
        ):
            continue
        count = len(value)
        stages = [int(found[1]) for item in value if (found := re.fullmatch(r"stage(\d+)", str(item)))]
        if len(set(value)) < count or (all(isinstance(item, int) for item in value) and max(value) > count):
            fields[name] = list(range(1, count + 1))
        elif stages and max(stages) > 4:
            fields[name] = [f"stage{place + 1}" for place in range(count)]
        else:
            continue
        if "num_hidden_layers" in fields:
            fields["num_hidden_layers"] = count


def _class_of(spec: Any) -> Any:
    cls = spec.config_class
    if dataclasses.is_dataclass(cls) and getattr(cls, "model_type", ""):
        return cls
    return spec.get_config_class(spec.model_type) if spec.model_type else None


def variants(cls: Any) -> list[dict[str, Any]]:
    """Return tiny configurations of a class in the order in which they are tried: some classes ask for more."""
    plain = tiny_fields(cls)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sections = {"rope_parameters": {**rope, "mrope_section": [2, 1, 1]}}
    heads = _changed(plain, cls, {"num_key_value_heads": HEADS})
    found = [plain, heads, _changed(plain, cls, sections), _changed(heads, cls, sections)]
    found += [_changed(heads, cls, {"rope_parameters": rope}), by_kind(plain, cls), by_kind(heads, cls)]
    found += [_changed(by_kind(heads, cls), cls, sections), _changed(heads, cls, _TOLD)]
    found += [_changed(heads, cls, {"head_dim": 2 * HEAD_DIM, **more}) for more in ({}, sections)]
    found += [scaled(cls), _changed(heads, cls, {"hidden_size": 48, "num_hidden_layers": 6})]
    found += [settled(plain, cls), settled(by_kind(heads, cls), cls)]
    return [fields for index, fields in enumerate(found) if fields not in found[:index]]


_TOLD: dict[str, Any] = {
    **{"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 2},
    **{"num_experts_per_tok": 2, "num_kv_shared_layers": 0, "axial_pos_embds": False, "default_language": "en_XX"},
    **{"layer_group_size": 2, "num_hidden_layers": LAYERS, "feature_size": HIDDEN, "mask_feature_size": HIDDEN},
}
"""What classes leave to their user, or derive from more layers than a tiny model has."""


def by_kind(fields: dict[str, Any], cls: Any) -> dict[str, Any]:
    """Return the fields with one layer of each kind that a class has by default, in the class and in its parts."""
    names = {field.name for field in dataclasses.fields(cls)}
    parts = {
        name: by_kind(fields[name], _class_of(spec))
        for name, spec in (getattr(cls, "sub_configs_defaults", None) or {}).items()
        if isinstance(fields.get(name), dict) and _class_of(spec) is not None
    }
    own: dict[str, Any] = {}
    kinds = _kinds(cls)
    name = next((n for n in ("layer_types", "layers_block_type") if n in names), "")
    if name:
        kinds = kinds if len(kinds) > 1 else ["conv", "full_attention"] if not kinds else [*kinds, "full_attention"]
        own = {name: kinds, "num_hidden_layers": len(kinds)}
    elif "attn_layer_indices" in names:
        own = {"attn_layer_indices": [1], "num_hidden_layers": 2}
    elif len(kinds) == 1 and "num_hidden_layers" in names:
        own = {"num_hidden_layers": 2 * LAYERS}
    return {**fields, **own, **parts}


def settled(fields: dict[str, Any], cls: Any) -> dict[str, Any]:
    """Return the fields with those lists of numbers, in small, that a class leaves open and fills in when it is made."""
    parts = {
        name: settled(fields[name], _class_of(spec))
        for name, spec in (getattr(cls, "sub_configs_defaults", None) or {}).items()
        if isinstance(fields.get(name), dict) and _class_of(spec) is not None
    }
    try:
        made = cls()
    except Exception:  # a class that has no defaults
        return {**fields, **parts}
    own = {}
    for field in dataclasses.fields(cls):
        try:
            value = getattr(made, field.name, None)
        except Exception:  # a field that each layer has its own of
            continue
        is_open = field.default is None and not field.name.startswith("_") and field.name not in fields
        if is_open and isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
            own[field.name] = tiny_list(field.name, list(value))
    found = {**fields, **own, **parts}
    _settle(found)
    return found


def _kinds(cls: Any) -> list[str]:
    try:
        return list(dict.fromkeys(getattr(cls(), "layer_types", None) or []))
    except Exception:  # a class that has no defaults
        return []


def scaled(cls: Any) -> dict[str, Any]:
    """Return a configuration whose channels are an eighth of the defaults: lists of them stay in step with one another."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = field.default if field.default is not dataclasses.MISSING else None
        if _WIDTHS.search(field.name):
            if isinstance(value, int) and not isinstance(value, bool):
                found[field.name] = _an_eighth(value)
            elif isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
                found[field.name] = [_an_eighth(item) for item in value]
        elif (new := tiny_value(field.name, value, Tokens())) != value and not field.name.startswith("_"):
            found[field.name] = new
    return found


def by_sizes(fields: dict[str, Any], cls: Any, sizes: set[int]) -> dict[str, Any]:
    """Return the fields with those numbers made small that are sizes of the model's parameters, in the class and in its parts.

    Args:
        fields: A configuration's fields.
        cls: Its class.
        sizes: The parameters' sizes in all dims [entries].
    """
    try:
        made = cls(**copy.deepcopy(fields)).to_dict()
    except Exception:  # a class that refuses these fields refuses them again
        return fields
    return {**fields, **_smaller(made, sizes, fields)}


def _smaller(made: dict[str, Any], sizes: set[int], fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in made.items():
        if isinstance(value, dict) and "model_type" in value:
            inner = fields.get(name) if isinstance(fields.get(name), dict) else {}
            if smaller := _smaller(value, sizes, inner or {}):
                found[name] = {**(inner or {}), "model_type": value["model_type"], **smaller}
        elif isinstance(value, list) and value and all(type(item) is int for item in value):
            if any(item in sizes and item > _SMALL for item in value):
                found[name] = [HIDDEN if item > HIDDEN else item for item in value]
        elif type(value) is int and value > _SMALL and value in sizes:
            found[name] = VOCABULARY if "vocab" in name else POSITIONS if "position" in name else HIDDEN
    return found


_WIDTHS = re.compile(r"(channels|hidden_size|hidden_sizes|embed_dims?|embedding_size|widths)$")


def _an_eighth(value: int) -> int:
    return value if value <= 4 else max(8, value // 8)


def _changed(fields: dict[str, Any], cls: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with changes, in a class and in its parts, wherever it has such a field."""
    names = {field.name for field in dataclasses.fields(cls)}
    parts = {
        name: _changed(fields[name], _class_of(spec), changes)
        for name, spec in (getattr(cls, "sub_configs_defaults", None) or {}).items()
        if isinstance(fields.get(name), dict) and _class_of(spec) is not None
    }
    is_text = "vocab_size" in names
    own = {
        n: copy.deepcopy(value) for n, value in changes.items() if n in names and (is_text or n != "rope_parameters")
    }
    return {**fields, **own, **parts}
