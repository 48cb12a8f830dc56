"""A small modern GPT in plain PyTorch: RMSNorm, rotary positions, SwiGLU, grouped-query attention, tied embeddings.

Nothing here knows about devices, ranks or plans.  `examples/gpt_python.toml` trains it on the source code of
Python's standard library, one byte a token.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    vocabulary_size: int = 256
    max_length: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None  # fewer than num_heads: grouped-query attention; None: as many
    hidden_size: int = 128
    ffn_size: int | None = None  # None: 8/3 of the hidden size, rounded up to a multiple of 32
    tie_embeddings: bool = True
    dropout: float = 0.0
    rope_base: float = 10_000.0
    initializer_std: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"hidden_size={self.hidden_size} is not num_heads={self.num_heads} x an even head size")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")


def rotary_tables(head_size: int, length: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, each [length, head_size / 2]."""
    frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) by its position's angle.  x: [batch, heads, length, head_size]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        kv_size = self.head_size * (config.num_kv_heads or config.num_heads)
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.dropout = config.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # The number of heads is read off each projection's result, [batch, length, heads x head_size].
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.size(1) != k.size(1),
        )
        return self.output(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        ffn_size = config.ffn_size or -(-8 * config.hidden_size // 3 // 32) * 32
        self.gate = nn.Linear(config.hidden_size, ffn_size, bias=False)
        self.up = nn.Linear(config.hidden_size, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class GPT(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, vocabulary_size]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.head = nn.Linear(config.hidden_size, config.vocabulary_size, bias=False)
        cos, sin = rotary_tables(config.hidden_size // config.num_heads, config.max_length, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.size(1)
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))

    def _initialize(self) -> None:
        # GPT-2's rule: what is added to the residual stream shrinks with the number of additions.
        residual_std = self.config.initializer_std / (2 * self.config.num_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith(("attention.output", "ffn.down"))
                nn.init.normal_(module.weight, std=residual_std if into_residual else self.config.initializer_std)


def build_gpt(**settings: object) -> GPT:
    """Build a GPT; the settings are the fields of `GPTConfig`."""
    return GPT(GPTConfig(**settings))  # pyright: ignore[reportArgumentType]
