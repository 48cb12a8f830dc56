"""Models written the ways in which people write them, for tensor parallelism: each has something of its own to be cut.

Widths, heads and blocks are small and awkward: 24 features in 4 or 6 heads, 13 hidden features, vocabularies of 29.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.models.tensor_attention import (
    LENGTH,
    EinsumAttention,
    HeadBiasAttention,
    HeadMajorAttention,
    LatentAttention,
    LinearEinsumAttention,
    MaskedMultihead,
    PackedGroupedAttention,
    PartSizedAttention,
    SeparateAttention,
    SlicedAttention,
    SlopedAttention,
    SplitAttention,
    UnbindAttention,
    WholeNormAttention,
)
from tests.parity.models.tensor_convolutions import GatedConvolution
from torch import Tensor, nn

VOCABULARY = 29
CLASSES = 5


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
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
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
    "latent_written": lambda width: (LatentAttention(width, 6, written=True), Mlp(width, 13)),
    "whole_norm": lambda width: (WholeNormAttention(width, 4), Mlp(width, 13)),
    "part_sized": lambda width: (PartSizedAttention(width, 4), Mlp(width, 13)),
    "conformer": lambda width: (HeadBiasAttention(width, 4), GatedConvolution(width)),
    "sloped": lambda width: (SlopedAttention(width, 6), Mlp(width, 13)),
    "packed": lambda width: (PackedGroupedAttention(width, 4), Mlp(width, 13)),
}
"""Styles of a decoder's attention and feed-forward part."""


def build_decoder(kind: str, width: int = 24) -> nn.Module:
    """Return a language model whose blocks are written in the style of this name."""
    return Decoder(width, lambda: Block(width, *DECODERS[kind](width))).double()
