"""Batches of an autoencoder: the tensor itself, alone in a tuple, or under a key. Inputs are targets; there are no labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity.harness import cut
from tests.tolerances import FLOAT64
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing

WIDTH, NUM_SAMPLES, NUM_STEPS = 6, 7, 4


def build() -> nn.Module:
    torch.manual_seed(1)
    down = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh()]
    return nn.Sequential(*down, nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH)).double()


def rebuilt(outputs: Tensor, batch: Any) -> Tensor:
    (inputs,) = batch.values() if isinstance(batch, dict) else [batch] if isinstance(batch, Tensor) else batch
    return (outputs - inputs).square().mean()


FORMS = {"tensor": lambda x: x, "tuple": lambda x: (x,), "list": lambda x: [x], "dict": lambda x: {"input": x}}


def _batches(form: str) -> list[Any]:
    source = torch.Generator().manual_seed(2)
    shape = (NUM_SAMPLES, WIDTH)
    return [FORMS[form](torch.randn(shape, generator=source, dtype=torch.float64)) for _ in range(NUM_STEPS)]


def _steps(form: str, line: str) -> list[testing.StepRecord]:
    plan, batches = mw.Plan.parse(line), _batches(form)
    sizes = [NUM_SAMPLES // plan.dp + (rank < NUM_SAMPLES % plan.dp) for rank in range(plan.dp)]
    rank = mw.current_world().rank // (plan.tp * plan.pp) if plan.dp > 1 else 0
    shares = [cut(batch, sizes)[rank] for batch in batches]
    return testing.plan_steps(build, plan, batches, rebuilt, shares=shares)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("line", "ranks"),
    [("dp=2,micro_batches=2", 2), ("dp=2,zero=3", 2), ("tp=2", 2), ("pp=2,micro_batches=2", 2), ("micro_batches=3", 1)],
)
def test_an_autoencoder_equals_one_device(form: str, line: str, ranks: int) -> None:
    expected = testing.oracle_steps(build, _batches("tensor"), rebuilt)
    for found in testing.run_ranks(_steps, ranks, form, line):
        testing.assert_parity(found, expected, FLOAT64)
