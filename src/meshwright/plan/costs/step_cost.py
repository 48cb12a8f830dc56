"""Cost of one step as numbers: of the whole step, and of its passes before data parallelism."""

from __future__ import annotations

import dataclasses

from meshwright.plan.costs.layer_times import LayerTimes
from meshwright.plan.costs.rank_memory import RankLoad, RankMemory
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.stages_on_ranks import StagesOnRanks

__all__: list[str] = []


@dataclasses.dataclass(slots=True)
class StepCost:
    """Seconds and bytes of one step."""

    forward_s: float
    backward_s: float
    recompute_s: float
    bubble_s: float
    exposed_comm_s: float
    optimizer_s: float
    memory: RankMemory
    sent_bytes: dict[str, float]

    @property
    def step_s(self) -> float:
        """The step's time [s]."""
        busy = self.forward_s + self.backward_s + self.recompute_s
        return busy + self.bubble_s + self.exposed_comm_s + self.optimizer_s


@dataclasses.dataclass(slots=True)
class PassesCost:
    """What a step costs before data parallelism: setups that differ in ZeRO alone share it."""

    forward_s: float
    backward_s: float
    recompute_s: float
    bubble_s: float
    waits_s: float
    num_params: float
    loads: list[RankLoad]
    """What the ranks hold, without those that another one exceeds in everything."""
    kinds: tuple[LayerTimes, ...]
    placed: StagesOnRanks
    setup: Setup
    """What the passes saw of it."""
