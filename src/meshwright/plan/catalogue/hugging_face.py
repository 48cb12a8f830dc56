"""Hugging Face's `config.json` of a decoder as a ModelSpec, read without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

from meshwright.errors import ConfigError
from meshwright.spec.model import ModelSpec
from meshwright.texts import is_directory, parse_json, read_text

__all__: list[str] = []

_GATED: Final = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo", "olmo2", "granite")
_PLAIN: Final = ("gpt2", "gpt_neox", "opt", "bloom")

_NAMES: Final = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions", "n_ctx"),
    "experts": ("num_local_experts",),
    "experts_per_token": ("num_experts_per_tok",),
}
"""Our name -> the names that configurations use."""


def read_hugging_face(path: Path, *, sequence: int | None = None) -> ModelSpec:
    """Return the model of a `config.json`.

    Args:
        path: The file, or the directory that has it.
        sequence: Tokens of a sample; None means the longest that the model takes [tokens].

    Raises:
        ConfigError: The file cannot be read, a size is missing, or its ``model_type`` is not a decoder that is known here.
    """
    file = path / "config.json" if is_directory(path) else path
    try:
        config: object = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: '{file}' cannot be read: {error}", fix="give it a Hugging Face config.json"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"model: '{file}' is not a JSON object", fix="give it a Hugging Face config.json")
    entries = cast("dict[str, Any]", config)
    kind = entries.get("model_type")
    if kind not in (*_GATED, *_PLAIN):
        raise ConfigError(
            f"model: '{file}' has model_type '{kind}', which is read by running it alone; "
            f"read from sizes: {', '.join((*_GATED, *_PLAIN))}",
            fix="give 'package.module:callable' that returns the model",
        )
    sizes = {ours: _first(entries, theirs) for ours, theirs in _NAMES.items()}
    if sequence is not None:
        sizes["sequence"] = sequence
    for name in ("layers", "hidden", "heads", "vocab", "sequence"):
        if sizes[name] is None:
            raise ConfigError(
                f"model: '{file}' names none of {', '.join(_NAMES[name])}", fix=f"add '{_NAMES[name][0]}' to it"
            )
    return ModelSpec.transformer(
        name=str(entries.get("_name_or_path") or kind),
        gated=kind in _GATED,
        tied=bool(entries.get("tie_word_embeddings", kind not in _GATED)),
        bias=None if kind in _PLAIN else bool(entries.get("attention_bias", False)),
        learned_positions=kind in ("gpt2", "opt"),
        norm="rms" if kind in _GATED else "layer",
        **{name: size for name, size in sizes.items() if size is not None},
    )


def _first(entries: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((entries[name] for name in names if entries.get(name) is not None), None)
