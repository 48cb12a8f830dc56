"""Models of other kinds than the GPT whose steps the planner's costs under autocast were first held against."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its batch by number of samples, and its loss."""

    build: Callable[[], nn.Module]
    batch_of: Callable[[int, torch.device], dict[str, Tensor]]
    loss_fn: Callable[[Any, Any], Tensor]


def _of_transformers(name: str, config: str, **sizes: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    model: nn.Module = getattr(library, name)(getattr(library, config)(**sizes))
    return model


def _tokens(vocab: int, samples: int, seq: int, device: torch.device) -> Tensor:
    return torch.randint(vocab, (samples, seq), generator=torch.Generator().manual_seed(0)).to(device)


def _text(vocab: int, seq: int) -> Callable[[int, torch.device], dict[str, Tensor]]:
    def batch_of(samples: int, device: torch.device) -> dict[str, Tensor]:
        tokens = _tokens(vocab, samples, seq, device)
        return {"input_ids": tokens, "labels": tokens}

    return batch_of


def _images(side: int, classes: int) -> Callable[[int, torch.device], dict[str, Tensor]]:
    def batch_of(samples: int, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(samples, 3, side, side, generator=generator)
        labels = torch.randint(classes, (samples,), generator=generator)
        return {"pixel_values": pixels.to(device), "labels": labels.to(device)}

    return batch_of


def _next_tokens(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def _same_tokens(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1).float(), batch["labels"].flatten())


def _classes(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.logits.float(), batch["labels"])


def llama() -> nn.Module:
    """Return 0.5 billion parameters with RMSNorm, rotary positions, gated layers and grouped keys."""
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 24}
    return _of_transformers(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=32000, num_key_value_heads=8, use_cache=False, **sizes
    )


def bert() -> nn.Module:
    """Return BERT-large with its head for masked tokens, without dropout."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _of_transformers("BertForMaskedLM", "BertConfig", **sizes, **rates)


def vit() -> nn.Module:
    """Return ViT-L/16 with a thousand classes."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    return _of_transformers("ViTForImageClassification", "ViTConfig", num_labels=1000, **sizes)


def resnet() -> nn.Module:
    """Return ResNet-50 with a thousand classes."""
    return _of_transformers("ResNetForImageClassification", "ResNetConfig", num_labels=1000)


OTHERS = {
    "llama-16x1536": Workload(llama, _text(32000, 1024), _next_tokens),
    "bert-24x1024": Workload(bert, _text(30522, 512), _same_tokens),
    "vit-24x1024": Workload(vit, _images(224, 1000), _classes),
    "resnet-50": Workload(resnet, _images(224, 1000), _classes),
}
