"""Convolutions with norms over their channels, for tensor parallelism."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

CLASSES = 5


class GatedConvolution(nn.Module):
    """A conformer's convolution: gated channels, one in groups with a bias, and a norm over all channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(width, 2 * width, 1)
        self.depthwise_conv = nn.Conv1d(width, width, 3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pointwise_conv2 = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.pointwise_conv1(x.transpose(1, 2)), dim=1)
        x = self.depthwise_conv(F.pad(x, (2, 0)))
        x = F.silu(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return self.pointwise_conv2(x).transpose(1, 2)


class ChannelNorm(nn.LayerNorm):
    """A norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Neck(nn.Module):
    """A convolution in groups, one of weight and size, then blocks of two with norms over channels, as after a vision tower."""

    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=3)
        self.scaled = weight_norm(nn.Conv2d(width, width, 3, padding=1))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, hidden, 1),
                ChannelNorm(hidden),
                nn.GELU(),
                nn.Conv2d(hidden, width, 3, padding=1),
                ChannelNorm(width),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.mix(x).tanh()
        x = x + self.scaled(x).sin()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))
