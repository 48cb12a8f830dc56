"""Facts of a model that its config or its operators tell: heads, width, vocabulary, sequence."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright._torch_private import storage_id
from meshwright.describe.batches import model_inputs
from meshwright.describe.per_sample import Samples
from meshwright.describe.recorder import ForwardRecorder
from meshwright.trees import tensors_in

__all__: list[str] = []

_WORDS: Final = {
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "nhead"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "embed_dim"),
    "vocab_size": ("vocab_size", "vocabulary_size"),
}
"""What configs of transformers, nanoGPT, llama and their like call these."""


_HOLDERS: Final = (Tensor, list, tuple, dict)


def facts_of(
    module: nn.Module, recorder: ForwardRecorder, samples: Samples, shapes: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Return num_heads, num_kv_heads, hidden_size and vocab_size, as far as they are known [count]."""
    found = {**_of_operators(recorder, samples, shapes), **_of_config(getattr(module, "config", None))}
    if "num_heads" in found:
        found.setdefault("num_kv_heads", found["num_heads"])
    return found


def sequence_of(batch: Any) -> int | None:
    """Return the tokens of a sample: dim 1 of the first integer input; None where there is none [tokens]."""
    for tensor in tensors_in(model_inputs(batch)):
        if tensor.dim() > 1 and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            return int(tensor.shape[1])
    return None


def kept_bytes(module: nn.Module) -> int:
    """Return the memory of buffers, and of tensors that modules keep as attributes; not of parameters or results [bytes].

    A buffer that is an attribute under another name, too, may count twice: on fake tensors the two are no longer one.
    """
    own = {storage_id(parameter) for parameter in module.parameters() if parameter.layout == torch.strided}
    found: dict[int, int] = {}
    held = [*module.buffers()]
    for child in module.modules():
        plain = [value for name, value in vars(child).items() if name not in ("_parameters", "_buffers", "_modules")]
        held += [tensor for value in plain if isinstance(value, _HOLDERS) for tensor in tensors_in(value)]
    for tensor in held:
        if tensor.layout == torch.strided and not tensor.requires_grad:
            found[storage_id(tensor)] = tensor.untyped_storage().nbytes()
    return sum(size for place, size in found.items() if place not in own)


def _of_config(config: Any) -> dict[str, int]:
    config = getattr(config, "text_config", config)
    found: dict[str, int] = {}
    for fact, words in _WORDS.items():
        values = [config.get(word) if isinstance(config, Mapping) else getattr(config, word, None) for word in words]
        known = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0]
        if known:
            found[fact] = known[0]
    return found


def _of_operators(recorder: ForwardRecorder, samples: Samples, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    heads: collections.Counter[tuple[int, int]] = collections.Counter()
    tables: list[Sequence[int]] = []
    for step in recorder.steps:
        for product in step.products:
            share = (
                samples.of_product(product, weight_factor=step.weight_factor) if product.kind == "attention" else None
            )
            if share is not None:
                heads[share.count, share.num_keys] += 1
        if step.is_lookup and len(shapes[step.weights[0]]) == 2:
            tables.append(shapes[step.weights[0]])
    if heads:
        found["num_heads"], keys = heads.most_common(1)[0][0]
        if keys:
            found["num_kv_heads"] = keys
    if tables:
        largest = max(tables, key=lambda shape: shape[0])
        found["vocab_size"], found["hidden_size"] = int(largest[0]), int(largest[1])
    return found
