"""Blocks of a stream of feature maps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.fuzz import parts
from torch import Tensor, nn


def map_norm(kind: str, width: int) -> nn.Module:
    if kind == "batch":
        return parts.jitter(nn.BatchNorm2d(width))
    if kind == "none":
        return nn.Identity()
    groups = {"group": next(n for n in (3, 2, 1) if width % n == 0), "layer": 1, "instance": width}
    return parts.jitter(nn.GroupNorm(groups.get(kind, 1), width))


class Residual(nn.Module):
    """Two convolutions beside a shortcut, as in ResNet."""

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        kind, hidden = form.get("norm", "group"), form.get("hidden", 6)
        self.conv1 = nn.Conv2d(width, hidden, 3, padding=1, bias=kind == "none")
        self.bn1 = map_norm(kind, hidden)
        self.relu = parts.activation_module(form.get("act", "ReLU(inplace)"))
        self.conv2 = nn.Conv2d(hidden, width, 3, padding=1, bias=kind == "none")
        self.bn2 = map_norm(kind, width)
        self.inplace = form.get("inplace_residual", False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.inplace:
            y += x
        else:
            y = y + x
        return self.relu(y)


class Inverted(nn.Module):
    """Expansion, a depthwise convolution, a gate over the channels, projection."""

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        hidden, kind = form.get("hidden", 9), form.get("norm", "group")
        self.expand = nn.Sequential(nn.Conv2d(width, hidden, 1), map_norm(kind, hidden), nn.ReLU6(inplace=True))
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.squeeze, self.excite = nn.Linear(hidden, 3), nn.Linear(3, hidden)
        self.project = nn.Conv2d(hidden, width, 1)
        self.act = parts.activation(form.get("act", "F.silu"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.depthwise(self.expand(x)))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        return x + self.project(y * gate[:, :, None, None])


class Plain(nn.Module):
    """Activation first and in place, then a convolution: VGG's order, cut where people cut it."""

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        groups = form.get("groups", 1)
        self.net = nn.Sequential(
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, groups=groups if width % groups == 0 else 1),
            map_norm(form.get("norm", "none"), width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class UpDown(nn.Module):
    """Down by pooling or a stride and up by a transposed convolution, with a skip joined on, as in U-Nets."""

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        hidden = form.get("hidden", 6)
        self.down = nn.Conv2d(width, hidden, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(hidden, hidden, 2, stride=2)
        self.join = nn.Conv2d(width + hidden, width, 1)
        self.act = parts.activation(form.get("act", "F.gelu"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.act(self.down(x)))
        return self.join(torch.cat([x, y], dim=1))


KINDS: dict[str, Any] = {"residual": Residual, "inverted": Inverted, "conv_plain": Plain, "updown": UpDown}
