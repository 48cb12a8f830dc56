"""Pairs of layers that stand in one list: the module that holds the list runs them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.apply.tensor.search.search import Search


class Convolution(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(before, after, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.conv(x))


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Convolution(1, 8), Convolution(8, 6), Convolution(6, 8), Convolution(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Sounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = Features()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x[:, None]).tanh().mean(-1) ** 2)


def test_neighbours_in_a_list_are_columns_and_rows() -> None:
    torch.manual_seed(0)
    net, sounds = Sounds().double(), torch.randn(3, 20).double()

    def run(copy: nn.Module) -> Any:
        outputs = copy(sounds)
        outputs.square().mean()
        return outputs

    layout = Search(net, 2, run).layout()
    roles = {name: role for region in layout.regions for name, role in region.roles.items()}
    assert {region.scope for region in layout.regions} >= {"features"}
    assert [roles[f"features.layers.{place}.conv"] for place in range(4)] == ["column", "row", "column", "row"]
