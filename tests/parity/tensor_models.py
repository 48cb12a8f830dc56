"""Models written the ways in which people write them, for tensor parallelism: each has something of its own to be cut.

Widths, heads and blocks are small and awkward: 24 features in 4 or 6 heads, 13 hidden features, vocabularies of 29.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 29
LENGTH = 7
CLASSES = 5


# -- decoders: one attention each -----------------------------------------------------------------------------------


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
        att = F.softmax(att + torch.full((T, T), -1e9, dtype=x.dtype).triu(1), dim=-1)
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
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=mask)[0].transpose(0, 1)


class LatentAttention(nn.Module):
    """Keys and values from a latent that all heads share, beside a part of the keys that they share as it is."""

    def __init__(self, width: int, heads: int, latent: int = 9, shared: int = 4) -> None:
        super().__init__()
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
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
        places = torch.arange(length)
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


# -- feed-forward parts ---------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two layers with an activation."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class ChunkedSwiGlu(nn.Module):
    """Gate and up in one layer, taken apart by chunk."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class DeepMlp(nn.Module):
    """Five layers with residual sums around some."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.inner = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(3))
        self.last = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for layer in self.inner:
            x = F.relu(layer(x))
        return self.last(x)


class ReadFromOutside(nn.Module):
    """A layer that is never called: its weight is used by the module around it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)


# -- models ---------------------------------------------------------------------------------------------------------


class LayerScale(nn.Module):
    """A factor for each feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Attention and feed-forward part, each after a norm and beside a residual."""

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module, *, scaled: bool = False) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = attention
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = mlp
        self.ls_1 = LayerScale(width) if scaled else nn.Identity()
        self.ls_2 = LayerScale(width) if scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls_1(self.attn(self.ln_1(x)))
        return x + self.ls_2(self.mlp(self.ln_2(x)))


class Decoder(nn.Module):
    """A language model of blocks, with a tied head."""

    def __init__(self, width: int, make_block: Any, num_blocks: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class DictDecoder(nn.Module):
    """Blocks that hand a dict on, and take one."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(_DictLayer(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        states = {"x": self.embedding(batch["ids"]), "scale": batch["scale"]}
        for layer in self.layers:
            states = layer(states)
        return self.head(states["x"])


class _DictLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, 13)

    def forward(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        x = states["x"]
        return {**states, "x": x + states["scale"] * self.mlp(self.norm(x))}


class Mixer(nn.Module):
    """An MLP over the tokens and one over the features, in turns."""

    def __init__(self, width: int = 24, tokens: int = 9) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=3)
        self.blocks = nn.ModuleList(_MixerBlock(width, tokens) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class _MixerBlock(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = Mlp(tokens, 13)
        self.channels = Mlp(width, 17)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions; fused attention by unbind, norms of queries and keys, scaled residuals."""

    def __init__(self, width: int = 24, heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.3)
        self.positions = nn.Parameter(torch.randn(1, 10, width) * 0.3)
        self.blocks = nn.Sequential(
            *(Block(width, UnbindAttention(width, heads, qk_norm=True), Mlp(width, 13), scaled=True) for _ in range(2))
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.blocks(x)[:, 0])


# -- convolutions ---------------------------------------------------------------------------------------------------


def build_vgg() -> nn.Module:
    """Convolutions and pooling one after the other, then linear layers on what they flatten to."""
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(7, 10, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 13, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(13, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12 * 4, 30),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(30, CLASSES),
    ).double()


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, each with BatchNorm, beside a shortcut."""

    expansion = 2

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        width = planes * self.expansion
        self.conv1 = nn.Conv2d(in_planes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or in_planes != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_planes, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class InvertedResidual(nn.Module):
    """Expansion, a depthwise convolution, projection, and a gate over the channels."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.GroupNorm(hidden, hidden), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False), nn.GroupNorm(hidden, hidden), nn.ReLU6()
        )
        self.project = nn.Conv2d(hidden, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.depthwise(self.expand(x)))


def build_bottlenecks() -> nn.Module:
    """A small ResNet of bottlenecks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Bottleneck(8, 7),
        Bottleneck(14, 9, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(18, CLASSES),
    ).double()


def build_depthwise() -> nn.Module:
    """A small MobileNet."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        InvertedResidual(8, 26),
        InvertedResidual(8, 26),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    ).double()


class DoubleConv(nn.Sequential):
    """Two convolutions."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(
            nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(), nn.Conv2d(num_out, num_out, 3, padding=1), nn.ReLU()
        )


class UNet(nn.Module):
    """Down, up, and what was before beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down = DoubleConv(3, 7), DoubleConv(7, 14)
        self.up = nn.ConvTranspose2d(14, 7, 2, stride=2)
        self.conv = DoubleConv(14, 7)
        self.outc = nn.Conv2d(7, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        before = self.inc(x)
        deep = self.down(F.max_pool2d(before, 2))
        return self.outc(self.conv(torch.cat([before, self.up(deep)], 1))).mean((2, 3))


# -- torch's own transformer ----------------------------------------------------------------------------------------


class Translator(nn.Module):
    """nn.Transformer with both embeddings and a causal mask."""

    def __init__(self, width: int = 24, heads: int = 6) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, heads, 2, 2, 13, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        x = self.transformer(self.source(ids.flip(1)), self.target(ids), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


# -- builders -------------------------------------------------------------------------------------------------------


DECODERS: dict[str, Any] = {
    "split_fused": lambda width: (SplitAttention(width, 4, fused=True), Mlp(width, 13)),
    "split_masked": lambda width: (SplitAttention(width, 4, fused=False), Mlp(width, 13)),
    "separate": lambda width: (SeparateAttention(width, 6), Mlp(width, 13)),
    "head_major": lambda width: (HeadMajorAttention(width, 6), ChunkedSwiGlu(width, 13)),
    "unbind": lambda width: (UnbindAttention(width, 6), ChunkedSwiGlu(width, 13)),
    "qk_norm": lambda width: (UnbindAttention(width, 4, qk_norm=True), DeepMlp(width, 13)),
    "sliced": lambda width: (SlicedAttention(width, 4), ReadFromOutside(width, 13)),
    "einsum": lambda width: (EinsumAttention(width, 6), Mlp(width, 13)),
    "linear_einsum": lambda width: (LinearEinsumAttention(width, 6), Mlp(width, 13)),
    "multihead": lambda width: (MaskedMultihead(width, 6), Mlp(width, 13)),
    "latent": lambda width: (LatentAttention(width, 6), Mlp(width, 13)),
    "whole_norm": lambda width: (WholeNormAttention(width, 4), Mlp(width, 13)),
    "sloped": lambda width: (SlopedAttention(width, 6), Mlp(width, 13)),
    "packed": lambda width: (PackedGroupedAttention(width, 4), Mlp(width, 13)),
}
"""Styles of a decoder's attention and feed-forward part."""


def build_decoder(kind: str, width: int = 24) -> nn.Module:
    """Return a language model whose blocks are written in the style of this name."""
    return Decoder(width, lambda: Block(width, *DECODERS[kind](width))).double()
