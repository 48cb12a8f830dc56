"""Experts in parameters of their own, whose gates and values lie in turns, are cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.apply.tensor.search.search import Search

EXPERTS, WIDTH, INNER = 3, 6, 8


class Experts(nn.Module):
    """Expert `i` takes the rows that the batch gives it; every other entry of its first product is a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER))
        self.first_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.second = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.second_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for index in range(EXPERTS):
            rows = torch.where(chosen == index)[0]
            both = x[rows] @ self.first[index] + self.first_bias[index]
            gated = both[..., ::2].sigmoid() * both[..., 1::2]
            result.index_add_(0, rows, gated @ self.second[index] + self.second_bias[index])
        return result


class Plain(nn.Module):
    """Experts without biases: two matrices in a module that holds nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.second = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for index in range(EXPERTS):
            rows = torch.where(chosen == index)[0]
            gate, value = F.linear(x[rows], self.first[index]).chunk(2, dim=-1)
            result.index_add_(0, rows, F.linear(F.silu(gate) * value, self.second[index]))
        return result


class Model(nn.Module):
    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.experts = Experts() if experts is None else experts
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.head(x + self.experts(x, chosen))


def test_experts_with_gates_in_turns_are_cut() -> None:
    torch.manual_seed(0)
    x, chosen = torch.randn(7, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    layout = Search(Model().double(), 2, lambda module: module(x, chosen)).layout()
    assert {"experts.first", "experts.first_bias", "experts.second"} <= layout.cuts.keys()


def test_two_matrices_of_one_module_are_no_layer_each() -> None:
    torch.manual_seed(0)
    x, chosen = torch.randn(7, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    layout = Search(Model(Plain()).double(), 2, lambda module: module(x, chosen)).layout()
    region, _ = layout.cuts["experts.first"]
    assert region.roles == {"experts": "sum"}
    assert layout.cuts["experts.second"][0] is region
