"""Cost of one step as numbers: of the whole step, and of its passes before data parallelism."""

from __future__ import annotations

import dataclasses

from meshwright.plan.costs.rank_memory import RankLoad, RankMemory

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
    sent_tp_bytes: float
    sent_pp_bytes: float
    loads: list[RankLoad]
