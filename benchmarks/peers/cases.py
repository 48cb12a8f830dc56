"""What every side trains: three GPTs, their batches, the loss and the optimizers."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

CASES = {
    # name: hidden size, layers, sequences per rank, tokens per sequence
    "latency-bound": (128, 4, 8, 64),
    "balanced": (256, 6, 16, 128),
    "bandwidth-bound": (512, 8, 4, 32),
}
MICRO_BATCHES = {"latency-bound": 8, "balanced": 8, "bandwidth-bound": 4}
"""Of a pipeline, which takes the sequences of two ranks [count]."""
VOCABULARY = 256
MAX_LENGTH = 128


def build_gpt(case: str, *, tie_embeddings: bool = True) -> nn.Module:
    import gpt

    hidden, layers, _, _ = CASES[case]
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": hidden // 32}
    return gpt.build_gpt(**sizes, vocabulary_size=VOCABULARY, max_length=MAX_LENGTH, tie_embeddings=tie_embeddings)


build_untied_gpt = functools.partial(build_gpt, tie_embeddings=False)
"""For pipelines: torch's cannot share a weight between two stages, so no side of theirs does."""


def build_llama(case: str) -> nn.Module:
    """Return a Llama of transformers of the GPT's sizes, with its own defaults otherwise: the head is not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, _, _ = CASES[case]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=-(-8 * hidden // 3 // 32) * 32,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_LENGTH,
        use_cache=False,  # of keys and values, for generation
    )
    return LlamaForCausalLM(config)


def loss_fn(outputs: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = (
        outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    )  # a model of Hugging Face returns a record
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def make_batch(case: str, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, sequences, tokens = CASES[case]
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(0, VOCABULARY, (sequences, tokens + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def optimizer_of(name: str) -> functools.partial[torch.optim.Optimizer]:
    if name == "sgd":
        return functools.partial(torch.optim.SGD, lr=0.1)
    return functools.partial(torch.optim.AdamW, lr=1e-3, **({"fused": True} if name == "adamw-fused" else {}))
