"""Layers whose weight no product takes as it is, cut by their outputs where a proof shows that it is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import Cut, TensorLayout

CHANNELS = 12


class Standardised(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class Mixed(nn.Conv2d):
    """A convolution in groups whose result mixes them."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).softmax(1)


class Net(nn.Module):
    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3)
        self.mix = mix
        self.head = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.layer_norm((x + self.mix(x)).movedim(1, -1), (CHANNELS,))
        return self.head(x.mean((1, 2)))


def _layout(mix: nn.Module, num_tp_ranks: int = 2) -> TensorLayout:
    torch.manual_seed(0)
    net, images = Net(mix).double(), torch.randn(3, 3, 7, 7).double()

    def run(copy: nn.Module) -> Any:
        outputs = copy(images)
        outputs.square().mean()
        return outputs

    return Search(net, num_tp_ranks, run).layout()


def _kind(layout: TensorLayout, name: str) -> str:
    return "whole" if name in layout.whole else layout.cuts[name][1].kind


@pytest.mark.parametrize("groups", [4, CHANNELS])
@pytest.mark.parametrize("num_tp_ranks", [2, 3])
def test_a_convolution_in_groups_that_stands_alone_is_cut_by_its_groups(groups: int, num_tp_ranks: int) -> None:
    layout = _layout(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups), num_tp_ranks)
    for name in ("mix.weight", "mix.bias"):
        region, cut = layout.cuts[name]
        assert (region.num_units, cut) == (groups, Cut(dim=0, groups=(CHANNELS,)))


def test_a_weight_that_is_standardised_first_is_cut_by_its_outputs() -> None:
    layout = _layout(Standardised(CHANNELS, CHANNELS, 3, padding=1))
    assert layout.cuts["mix.weight"][1] == Cut(dim=0, groups=(CHANNELS,))


class OfLengthOne(nn.Module):
    """A parametrisation by which all outputs' weights for an input have a sum of squares of one."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.normalize(weight, dim=0)


def _normalised() -> nn.Module:
    mix = nn.Conv2d(CHANNELS, CHANNELS, 1)
    parametrize.register_parametrization(mix, "weight", OfLengthOne())
    return mix


def test_a_parametrised_weight_is_cut_by_its_outputs_with_all_that_it_is_made_of() -> None:
    layout = _layout(weight_norm(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)))
    for name in ("mix.parametrizations.weight.original0", "mix.parametrizations.weight.original1", "mix.bias"):
        assert layout.cuts[name][1] == Cut(dim=0, groups=(CHANNELS,))


@pytest.mark.parametrize("mix", [_normalised(), spectral_norm(nn.Conv2d(CHANNELS, CHANNELS, 1))])
def test_a_parametrisation_that_mixes_outputs_computes_with_the_whole_weight(mix: nn.Module) -> None:
    assert _kind(_layout(mix), "mix.parametrizations.weight.original") == "stored"


def test_what_mixes_its_outputs_computes_with_the_whole_weight() -> None:
    assert _kind(_layout(Mixed(CHANNELS, CHANNELS, 3, padding=1, groups=4)), "mix.weight") == "stored"
