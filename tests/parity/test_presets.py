"""Every preset by its name, on models as tutorials write them, against one plain process in float64.

MESHWRIGHT_FULL_GRID=1 runs every model under every preset; by default each preset meets one or two of the models.
"""

from __future__ import annotations

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.harness import Setting, assert_distributed_parity, reference, run_case
from tests.scopes import FULL_GRID
from tests.tolerances import FLOAT64
from torch import nn

import meshwright as mw
from meshwright import testing

CELLS = (
    ("single", 1),
    *((preset, size) for preset in ("data_parallel", "model_parallel") for size in (2, 4)),
    *((preset, size) for preset in ("distributed", "zero1", "zero2", "zero3") for size in (2, 4)),
    *((preset, size) for preset in ("tensor", "pipeline") for size in (2, 4)),
    *(("hybrid", size) for size in ((2, 4, 8) if FULL_GRID else (2, 4))),
)

MODELS = tuple(name for name in cases.CASES if name.startswith("tutorial_") and "wide" not in name)

REFUSED = {
    "tutorial_mlp_100_50_10": "three calls of layers, which tensor parallelism cuts in one piece",
    "tutorial_mlp_10_10_5": "three calls of layers, which tensor parallelism cuts in one piece",
}
"""Models that have too few pieces for four stages, or for stages of what tensor parallelism cuts -> why."""


def _is_refused(name: str, preset: str, num_devices: int) -> bool:
    plan = mw.Plan.parse(preset, num_devices=num_devices)
    return name in REFUSED and (plan.pp > 3 or (plan.pp > 1 and plan.tp > 1))


def _matrix() -> list[tuple[str, str, int]]:
    rows = []
    for index, (preset, num_devices) in enumerate(CELLS):
        fitting = [name for name in MODELS if not _is_refused(name, preset, num_devices)]
        chosen = fitting if FULL_GRID else [fitting[index % len(fitting)]]
        rows += [(name, preset, num_devices) for name in chosen]
    return rows


@pytest.mark.parametrize(("name", "preset", "num_devices"), _matrix())
def test_a_preset_equals_one_process(name: str, preset: str, num_devices: int) -> None:
    plan = mw.Plan.parse(preset, num_devices=num_devices)
    line, setting = str(plan.replace(micro_batches=1)), Setting(num_samples=11, micro_batches=plan.micro_batches)
    if plan.num_ranks > 1:
        assert_distributed_parity(name, plan.num_ranks, setting, plan_text=line)
        return
    records = run_case(name, line, setting, devices=["cpu"] * plan.num_devices)
    testing.assert_parity(records, reference(name, setting), FLOAT64)


class SpreadByHand(nn.Module):
    """As in the tutorials on DDP: layers on two devices of one rank, and a forward that moves tensors between them."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(10, 10).to(first)
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.net1(x.to(self.first)))
        return self.net2(x.to(self.second))


def build_spread() -> nn.Module:
    return SpreadByHand(torch.device("cpu"), torch.device("cpu", 0)).double()


def spread_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    kind = torch.float64
    return [
        (torch.randn(7, 10, generator=generator, dtype=kind), torch.randn(7, 5, generator=generator, dtype=kind))
        for _ in range(3)
    ]


def train_spread(plan: str) -> list[testing.StepRecord]:
    return testing.plan_steps(build_spread, mw.Plan.parse(plan), spread_batches(), losses.square)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=0B"])
def test_a_model_that_its_author_spread_over_devices_trains_unmodified(plan: str) -> None:
    # On the CPU all its devices are one: what this shows is that its moves do no harm, not that two GPUs are used.
    expected = testing.oracle_steps(build_spread, spread_batches(), losses.square)
    for records in testing.run_ranks(train_spread, 2, plan):
        testing.assert_parity(records, expected, FLOAT64)
