"""Time that this project's own runtime adds to operators and exchanges, as a probe measured it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from meshwright.hardware.efficiency import Efficiency
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.stages_on_ranks import StagesOnRanks

__all__: list[str] = []

_IN_HALVES: Final = ("zb-h1", "zb-h2", "zbv")
"""Schedules that put gradients of weights off."""


def walks_s(
    efficiency: Efficiency, placed: StagesOnRanks, issued_s: Sequence[float], num_between: int, setup: Setup
) -> list[float]:
    """Return what each rank's stages take beside their layers for a micro-batch [s].

    Every stage follows the whole forward. Threads of one process have one interpreter, whose turns they wait for.

    Args:
        efficiency: The devices.
        placed: Their stages.
        issued_s: What the host issues for the layers' forward, as sums in their order [s].
        num_between: Calls of the model's own code between its layers [count].
        setup: Degrees, batch and numerics.
    """
    if setup.one_process and setup.dp > 1 and not efficiency.issues_ahead:
        return [(setup.dp - 1) * issued_s[-1]] * setup.pp
    num_layers = len(issued_s) - 1
    if setup.pp == 1 or setup.one_process or not efficiency.runtime:
        return [0.0] * setup.pp
    walks = [0.0] * setup.pp
    for rank, (first, last) in zip(placed.ranks, itertools.pairwise(placed.bounds), strict=True):
        walks[rank] += efficiency.runtime_s("stage", num_layers) + efficiency.runtime_s("between", num_between)
        walks[rank] += efficiency.runtime_s("half", last - first) if setup.schedule in _IN_HALVES else 0.0
    return walks


def sharding_s(efficiency: Efficiency, num_tensors: int, setup: Setup) -> float:
    """Return what a rank does beside exchanging, where ZeRO exchanges parameter by parameter [s]."""
    if setup.zero < 2 or setup.per_step or setup.dp == 1:
        return 0.0
    return setup.micro_batches * efficiency.runtime_s("zero", num_tensors / setup.pp)
