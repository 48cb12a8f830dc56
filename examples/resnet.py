"""A small ResNet in plain PyTorch, by default for scikit-learn's 8x8 digits: one channel, ten classes.

The normalisation is GroupNorm by default.  BatchNorm's statistics are those of the samples that a forward pass sees,
so with it the result depends on how a batch is cut into pieces; `norm="batch"` is there for those who want that.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def make_norm(kind: str, channels: int) -> nn.Module:
    if kind == "group":
        groups = next(n for n in (8, 4, 2, 1) if channels % n == 0)
        return nn.GroupNorm(groups, channels)
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    raise ValueError(f'norm="{kind}" is neither "group" nor "batch"')


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make_norm(norm, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = make_norm(norm, channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), make_norm(norm, channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, channels, height, width] -> logits [batch, num_classes]."""

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        widths: tuple[int, ...] = (16, 32, 64),
        blocks_per_width: int = 2,
        norm: str = "group",
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False), make_norm(norm, widths[0]), nn.ReLU()
        )
        blocks = []
        channels = widths[0]
        for index, width in enumerate(widths):
            for position in range(blocks_per_width):
                # Every width but the first starts by halving the image.
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(ResidualBlock(channels, width, stride, norm))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)))


def build_resnet(
    in_channels: int = 1,
    num_classes: int = 10,
    widths: tuple[int, ...] | list[int] = (16, 32, 64),
    blocks_per_width: int = 2,
    norm: str = "group",
) -> ResNet:
    """Build a ResNet; `widths` has one entry for each image size, the first at full size."""
    return ResNet(in_channels, num_classes, tuple(widths), blocks_per_width, norm)
