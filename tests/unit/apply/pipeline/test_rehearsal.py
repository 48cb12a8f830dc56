"""Bytes that a pipeline's ranks will send, foreseen in one process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.apply.pipeline.rehearsal import foresee_messages
from meshwright.errors import ApplyError
from meshwright.spec import Plan

ROWS, WIDTH = 3, 8
MESSAGE = 4 * ROWS * WIDTH


class _Tied(nn.Module):
    """A table at both ends, and a residual around the layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        start = values = self.table(values)
        for layer in self.layers:
            values = torch.relu(layer(values))
        return self.head(values + start)


def _chain(num_layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)


def _loss(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(outputs, batch[1])


@pytest.mark.parametrize(
    ("plan", "messages"),
    [
        ("pp=2,micro_batches=3", (1, 1)),
        (
            "pp=2,micro_batches=3,schedule=interleaved,virtual=2",
            (3, 3),
        ),  # both cross twice forward and once backward, or reversed
        ("pp=2,micro_batches=3,schedule=zbv", (2, 2)),  # the middle of the V stays on one rank
        ("pp=4,micro_batches=4", (1, 2, 2, 1)),
    ],
)
def test_a_chain_sends_activations_and_their_gradients(plan: str, messages: tuple[int, ...]) -> None:
    given = Plan.parse(plan)
    found = foresee_messages(functools.partial(_chain, 8), given, _batch(), _loss)
    assert found == [given.micro_batches * MESSAGE * count for count in messages]


def test_a_residual_crosses_and_tied_gradients_are_summed() -> None:
    sent = foresee_messages(_Tied, Plan(pp=2, micro_batches=2), _batch(), _loss)
    table = 4 * WIDTH * WIDTH  # over two ranks an all-reduce sends its tensor once
    assert sent == [2 * 2 * MESSAGE + table, 2 * 2 * MESSAGE + table]


def test_a_layer_that_is_too_heavy_for_one_stage_is_opened() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))

    assert sum(foresee_messages(build, Plan(pp=3, micro_batches=3), _batch(), _loss)) == 3 * 4 * MESSAGE


def test_what_the_runtime_refuses_is_refused() -> None:
    with pytest.raises(ApplyError, match="2 stages need at least as many layers"):
        foresee_messages(functools.partial(nn.Linear, WIDTH, WIDTH), Plan(pp=2, micro_batches=2), _batch(), _loss)


def test_buffers_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    foresee_messages(lambda: model, Plan(pp=2, micro_batches=2), _batch(), _loss)
    assert model[0].num_batches_tracked == 0
