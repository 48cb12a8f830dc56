"""Runs of memory that elementwise kernels walk."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.describe.memory_runs import memory_runs

WHOLE, HEADS = torch.zeros(6, 4, 8), torch.zeros(6, 8, 4)


@pytest.mark.parametrize(
    ("inputs", "runs"),
    [
        ((WHOLE, WHOLE), 1),
        ((WHOLE, torch.tensor(2.0)), 1),
        ((HEADS.transpose(1, 2), HEADS.transpose(1, 2)), 1),  # in one piece, whatever the order of its dimensions
        ((WHOLE, torch.zeros(8)), 24),  # each row meets the same eight
        ((WHOLE, torch.zeros(4, 8)), 6),
        ((WHOLE, torch.zeros(6, 4, 1)), 24),
        ((torch.zeros(6, 4, 16)[..., :8], WHOLE), 24),
        ((torch.zeros(6, 5, 8)[:, :4], WHOLE), 6),
        ((WHOLE[:1], torch.zeros(1, 4, 16)[..., :8]), 4),
    ],
)
def test_a_run_ends_where_a_tensor_does_not_lie_in_one_piece(inputs: tuple[Tensor, Tensor], runs: int) -> None:
    assert memory_runs(torch.ops.aten.mul.Tensor, inputs, [torch.mul(*inputs)]) == runs


def test_copies_walk_and_products_do_not() -> None:
    spread = HEADS.transpose(1, 2)
    assert memory_runs(torch.ops.aten.clone.default, [spread], [WHOLE]) == 24  # rows of eight, each read in steps
    assert memory_runs(torch.ops.aten.bmm.default, [WHOLE, HEADS], [torch.bmm(WHOLE, HEADS)]) == 0


def _runs_of_a_sample(forward: Callable[[nn.Module, Tensor], Tensor]) -> int:
    kind = type("Own", (nn.Module,), {"forward": forward})
    model = mw.describe_model(lambda: nn.Sequential(nn.Linear(16, 16), kind()), torch.zeros(4, 3, 16))
    return sum(operator.num_runs for layer in model.layers for operator in layer.operators)


def test_a_description_counts_the_runs_of_one_sample() -> None:
    assert _runs_of_a_sample(lambda _, x: x * x) <= 1
    assert _runs_of_a_sample(lambda _, x: x[..., :8] * x[..., 8:]) == 3
