"""Attention as people write it: each way has something of its own to be cut. `tensor_models.DECODERS` builds models of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 7
"""The longest text [token]."""


class SplitAttention(nn.Module):
    """Query, key and value in one layer, split by width; sizes from the input's shape; fused attention or a mask buffer."""

    def __init__(self, n_embd: int, n_head: int, *, fused: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(0.0)
        self.resid_dropout = nn.Dropout(0.0)
        self.n_head = n_head
        self.n_embd = n_embd
        self.fused = fused
        if not fused:
            mask = torch.tril(torch.ones(LENGTH, LENGTH))
            self.register_buffer("mask", mask.view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask: Any = self.mask
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(mask[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class SeparateAttention(nn.Module):
    """A layer each for query, key and value, as minGPT had it first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        k = self.key(x).view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = self.query(x).view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = self.value(x).view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = F.softmax(att + torch.full((T, T), -1e9, dtype=x.dtype, device=x.device).triu(1), dim=-1)
        return self.proj((att @ v).transpose(1, 2).reshape(B, T, C))


class HeadMajorAttention(nn.Module):
    """Query, key and value of a head lie beside each other in the fused weight."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)
        self.heads = heads
        self.head_dim = width // heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, self.heads, 3 * self.head_dim).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(y.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))


class UnbindAttention(nn.Module):
    """Fused weight, reshaped to (3, heads, head width), permuted and unbound; norms of each head's queries and keys."""

    def __init__(self, dim: int, num_heads: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class SlicedAttention(nn.Module):
    """Query, key and value taken from the fused result by slices."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        C = x.shape[-1]
        qkv = self.qkv(x)
        q, k, v = qkv[..., :C], qkv[..., C : 2 * C], qkv[..., 2 * C :]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class EinsumAttention(nn.Module):
    """Weights that are parameters with a dim of heads, and torch.einsum throughout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.w_q = nn.Parameter(torch.randn(heads, width, width // heads) * width**-0.5)
        self.w_k = nn.Parameter(torch.randn(heads, width, width // heads) * width**-0.5)
        self.w_v = nn.Parameter(torch.randn(heads, width, width // heads) * width**-0.5)
        self.w_o = nn.Parameter(torch.randn(heads, width // heads, width) * width**-0.5)
        self.scale = (width // heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("btc,hcd->bhtd", x, self.w_q)
        k = torch.einsum("btc,hcd->bhtd", x, self.w_k)
        v = torch.einsum("btc,hcd->bhtd", x, self.w_v)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scale
        y = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        return torch.einsum("bhtd,hdc->btc", y, self.w_o)


class LinearEinsumAttention(nn.Module):
    """Linear layers, and torch.einsum between them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (to(x).view(b, n, self.heads, -1) for to in (self.to_q, self.to_k, self.to_v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        return self.to_out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(b, n, -1))


class MaskedMultihead(nn.Module):
    """torch's own attention with the batch second, a causal mask and its weights asked for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        mask = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        return self.attention(x, x, x, attn_mask=mask)[0].transpose(0, 1)


class LatentAttention(nn.Module):
    """Keys and values from a latent that all heads share, beside a part of the keys that they share as it is.

    The keys are joined, or written into a new tensor.
    """

    def __init__(self, width: int, heads: int, latent: int = 9, shared: int = 4, *, written: bool = False) -> None:
        super().__init__()
        self.written = written
        self.heads, self.latent, self.shared = heads, latent, shared
        self.query = nn.Linear(width, heads * (4 + shared))
        self.down = nn.Linear(width, latent + shared)
        self.up = nn.Linear(latent, heads * (4 + 5))
        self.out = nn.Linear(heads * 5, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        latent, shared = self.down(x).split([self.latent, self.shared], -1)
        k, v = self.up(latent).view(batch, length, -1, 9).transpose(1, 2).split([4, 5], -1)
        q = self.query(x).view(batch, length, -1, 4 + self.shared).transpose(1, 2)
        shared = shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)
        if self.written:
            keys = k.new_empty(*k.shape[:-1], 4 + self.shared)
            keys[..., :4].copy_(k)
            keys[..., 4:].copy_(shared)
        else:
            keys = torch.cat([k, shared], -1)
        y = F.scaled_dot_product_attention(q, keys, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class WholeNormAttention(nn.Module):
    """Norms over the queries, and the keys, of all heads at once."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x)).view(shape).transpose(1, 2)
        k = self.k_norm(self.k_proj(x)).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class PartSizedAttention(nn.Module):
    """Query, key and value in one layer, split by a stored width. A head's size follows from the part: any count fits."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.split_size = heads, width
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(part) for part in self.c_attn(x).split(self.split_size, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.n_head, x.shape[-1] // self.n_head).transpose(1, 2)


class HeadBiasAttention(nn.Module):
    """A row of biases for each head, viewed by a count that no module keeps; keys of positions, as in Transformer-XL."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.sizes = {"heads": heads, "head": width // heads}
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.relative_k_proj = nn.Linear(width, width, bias=False)
        self.bias_u = nn.Parameter(0.3 * torch.randn(heads, width // heads))
        self.bias_v = nn.Parameter(0.3 * torch.randn(heads, width // heads))
        self.o_proj = nn.Linear(width, width)
        self.register_buffer("positions", torch.randn(1, LENGTH, width))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.sizes["head"])
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        places = self.relative_k_proj(self.positions[:, : x.shape[1]]).view(1, -1, *self.sizes.values())
        of_heads = (1, self.sizes["heads"], 1, self.sizes["head"])
        bias = (q + self.bias_v.view(of_heads)) @ places.permute(0, 2, 3, 1)
        y = F.scaled_dot_product_attention(q + self.bias_u.view(of_heads), k, v, attn_mask=bias)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SlopedAttention(nn.Module):
    """A temperature and a slope over the distance for each head, and a table of biases by distance."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.linspace(0.5, 1.5, heads))
        self.table = nn.Parameter(0.3 * torch.randn(2 * LENGTH - 1, heads))
        self.slopes = nn.Buffer(torch.linspace(0.1, 0.5, heads))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        places = torch.arange(length, device=self.table.device)
        distance = places[:, None] - places[None, :]
        bias = self.table[(distance + LENGTH - 1).view(-1)].view(length, length, -1).permute(2, 0, 1)
        bias = bias - self.slopes.view(-1, 1, 1) * distance.abs()
        scores = q @ k.transpose(-2, -1) * self.temperature.view(-1, 1, 1) + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class PackedGroupedAttention(nn.Module):
    """Two key heads; queries, keys and values of different widths in one layer, taken from it by slices."""

    def __init__(self, width: int, heads: int, key_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = heads, key_heads, width // heads
        self.qkv_proj = nn.Linear(width, (heads + 2 * key_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(x)
        first, second = self.heads * self.head_dim, (self.heads + self.key_heads) * self.head_dim
        q, k, v = qkv[..., :first], qkv[..., first:second], qkv[..., second:]
        q, k, v = (t.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))
