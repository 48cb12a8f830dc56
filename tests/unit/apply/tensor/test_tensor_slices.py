"""Tensors in slices that leave a region: all ranks know all sizes, also where some have no unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.apply.tensor.proof.threads import run_as_ranks
from meshwright.apply.tensor.region_state import Drawing, RunningRegion
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout

HEADS, KEY_HEADS, RANKS = 4, 2, 4
"""Two units of two heads each: the last two ranks have none."""


class Attention(nn.Module):
    """Grouped queries, and weights that leave beside the outputs, as Hugging Face's eager attention has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(20, HEADS * 6, bias=False)
        self.key = nn.Linear(20, KEY_HEADS * 6, bias=False)
        self.value = nn.Linear(20, KEY_HEADS * 6, bias=False)
        self.out = nn.Linear(HEADS * 6, 20, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def heads(layer: nn.Module) -> Tensor:
            return layer(x).view(*x.shape[:-1], -1, 6).transpose(1, 2)

        def repeated(layer: nn.Module) -> Tensor:
            return heads(layer).unsqueeze(2).expand(-1, -1, HEADS // KEY_HEADS, -1, -1).flatten(1, 2)

        keys, values = repeated(self.key), repeated(self.value)
        weights = F.softmax(torch.matmul(heads(self.query), keys.transpose(2, 3)), dim=-1)
        return self.out(torch.matmul(weights, values).transpose(1, 2).flatten(2)), weights


class Block(nn.Module):
    """Uses the outputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(20)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))[0]


def _layout() -> TensorLayout:
    torch.manual_seed(0)
    x = torch.randn(3, 7, 20, dtype=torch.float64)
    return Search(Block().double(), RANKS, lambda module: module(x)).layout()


def test_every_rank_knows_the_size_of_what_it_has_nothing_of() -> None:
    # Such a rank took a unit for one entry, and gathered slices of other sizes than the ranks that have them.
    region = Region(scope="", num_units=KEY_HEADS, cuts={}, roles={"": "sum"})

    def sizes(group: Any) -> tuple[int, ...]:
        local = torch.zeros(3, 2 if group.group_rank < KEY_HEADS else 0, 7, 7)
        return RunningRegion(region, group, Drawing(group)).sizes_of(local, 1)

    assert run_as_ranks(RANKS, sizes) == ([(2, 2, 0, 0)] * RANKS, [])


def test_weights_of_fewer_key_heads_than_ranks_leave_in_slices() -> None:
    (region,) = {id(region): region for region, _ in _layout().cuts.values()}.values()
    assert region.num_units == KEY_HEADS
    assert region.results == ((1, 1),)


def test_a_proof_refuses_slices_whose_sizes_ranks_do_not_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningRegion, "_told_size", lambda running, full, device: full or running.region.num_units)
    layout = _layout()
    assert all(region.num_units >= RANKS for region in layout.regions)
