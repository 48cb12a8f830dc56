"""A module with something between its two layers, and what the types say of it; for the tests of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.search.trace import Call
from meshwright.apply.tensor.tensor_layout import Cut, Region, TensorLayout
from meshwright.apply.tensor.types.report import TypeReport

WIDTH, HIDDEN = 6, 8


class Between(nn.Module):
    """Two layers with something between them, which a test chooses."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.seen = nn.Buffer(torch.zeros(()))
        self.function = function
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self, self.up(x)))


PAIR = Region(
    scope="",
    num_units=HIDDEN,
    cuts={
        "up.weight": Cut(dim=0, groups=(HIDDEN,)),
        "up.bias": Cut(dim=0, groups=(HIDDEN,)),
        "down.weight": Cut(dim=1, groups=(HIDDEN,), kind="row"),
    },
    roles={"up": "column", "down": "row"},
)


def experiment_of(
    module: nn.Module, shape: tuple[int, ...] = (2, 4, WIDTH), num_parts: int = 2, *, requires_grad: bool = True
) -> Experiment:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)
    return Experiment(module.double(), Call(args=(x,), kwargs={}), num_parts)


def types_of(function: Callable[[Any, Tensor], Tensor], region: Region = PAIR, **options: Any) -> TypeReport:
    experiment = experiment_of(Between(function), **options)
    return experiment.check_types(TensorLayout(regions=(experiment.prove(region),)))
