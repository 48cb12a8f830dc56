"""Attention in the forms that users write: fused or split projections, grouped keys, rotary, masks, torch's own modules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.fuzz import parts
from torch import Tensor, nn


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Rotary(nn.Module):
    """Tables of cosines that grow with the sequence, kept in buffers that are not saved."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("cos", torch.zeros(0, size), persistent=False)
        self.register_buffer("sin", torch.zeros(0, size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        if self.cos.shape[0] < length:
            angle = torch.arange(length).to(x.dtype)[:, None] / 10.0 ** torch.linspace(0, 1, self.size // 2).to(x.dtype)
            angle = torch.cat([angle, angle], dim=-1)
            self.cos, self.sin = angle.cos(), angle.sin()
        return rotate(x, self.cos[:length], self.sin[:length])


class Attention(nn.Module):
    """Self-attention with its own projections.

    Args:
        width: Features of the stream.
        form: Parameters drawn by `draw_attention`.
    """

    takes = "mask"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads = form["heads"], form.get("kv_heads") or form["heads"]
        self.size = width // self.heads
        self.fused = form.get("fused", "none")
        self.sdpa, self.causal = form.get("sdpa", True), form.get("causal", True)
        self.scale = form.get("scale")
        bias = form.get("bias", True)
        kind = form.get("linear", "plain")
        kv = self.kv_heads * self.size
        if self.fused == "none":
            self.q = parts.linear(kind, width, width, bias)
            self.k = parts.linear(kind, width, kv, bias)
            self.v = parts.linear(kind, width, kv, bias)
        else:
            self.qkv = parts.linear(kind, width, width + 2 * kv, bias)
        self.out = parts.linear(kind, width, width, bias)
        self.rotary = Rotary(self.size) if form.get("rotary") and self.size % 2 == 0 else None
        self.qk_norm = form.get("qk_norm", False)
        if self.qk_norm:
            self.q_norm, self.k_norm = parts.norm("layer", self.size), parts.norm("layer", self.size)
        self.sink = nn.Parameter(torch.zeros(self.heads)) if form.get("sink") else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, width = x.shape
        kv = self.kv_heads * self.size
        if self.fused == "none":
            q, k, v = self.q(x), self.k(x), self.v(x)
        elif self.fused == "unbind" and kv == width:
            return self.qkv(x).view(batch, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.fused == "chunk" and kv == width:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = self.qkv(x).split([width, kv, kv], dim=-1)
        q = q.view(batch, length, self.heads, self.size).transpose(1, 2)
        k = k.view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        return q, k, v.reshape(batch, length, -1, self.size).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if self.kv_heads != self.heads:
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        y = self.mix(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        length = q.shape[-2]
        allowed = None
        if self.causal:
            allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if mask is not None:
            keys = mask[:, None, None, :]
            allowed = keys if allowed is None else allowed & keys
        if self.sdpa and self.sink is None:
            if mask is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        scores = q @ k.transpose(-2, -1) * (self.scale or 1 / math.sqrt(self.size))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -1e9)
        if self.sink is not None:
            sink = self.sink.view(1, -1, 1, 1).expand(len(q), -1, length, 1)
            return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v


class TorchAttention(nn.Module):
    """nn.MultiheadAttention on batch-first tensors."""

    takes = "mask"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, form["heads"], bias=form.get("bias", True), batch_first=True)
        self.need_weights = form.get("need_weights", False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        ignored = None if mask is None else ~mask
        return self.attention(x, x, x, key_padding_mask=ignored, need_weights=self.need_weights)[0]


class EncoderLayer(nn.Module):
    """torch's TransformerEncoderLayer, which brings its own residual; the block around it adds none."""

    takes = "x"
    whole = True

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width,
            form["heads"],
            dim_feedforward=form.get("hidden", 13),
            dropout=0.0,
            activation=form.get("encoder_activation", "relu"),
            batch_first=True,
            norm_first=form.get("norm_first", False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class EinsumAttention(nn.Module):
    """Weights of several dims, one for each head, put together by einsum."""

    takes = "x"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        heads, size = form["heads"], width // form["heads"]
        self.wqkv = nn.Parameter(torch.randn(3, heads, width, size) / math.sqrt(width))
        self.wo = nn.Parameter(torch.randn(heads, size, width) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btc,nhcs->nbhts", x, self.wqkv)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return torch.einsum("bhts,hsc->btc", weights @ v, self.wo)
