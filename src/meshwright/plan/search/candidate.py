"""Candidate: one mix of strategies with its cost, and the plan that it is."""

from __future__ import annotations

import dataclasses
from typing import Final

from meshwright.plan.costs.setup import Setup, is_per_step, run_again
from meshwright.plan.costs.step_cost import StepCost
from meshwright.plan.costs.step_costs import StepCosts
from meshwright.plan.search.space import Choice, Degrees
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.train import TrainSpec

__all__: list[str] = []

_SIMPLER: Final = 0.01
"""A plan with fewer strategies wins against one that is faster by less than this share: predictions are not that exact."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A mix with its cost."""

    degrees: Degrees
    choice: Choice
    cost: StepCost

    @property
    def peak(self) -> float:
        """The memory of a device at the peak of a step [bytes]."""
        return self.cost.memory.peak

    def key(self) -> tuple[float, int]:
        """Return what candidates are sorted by: the time of a step; among equals the simpler one first."""
        return key_of(self.cost.step_s, num_strategies(self.degrees, self.choice))

    def least_s(self, _costs: StepCosts) -> float:
        """Return the time of a step [s]."""
        return self.cost.step_s

    def candidate(self, _costs: StepCosts) -> Candidate:
        """Return the candidate itself; see `mixes.Mix`."""
        return self


def num_strategies(degrees: Degrees, choice: Choice) -> int:
    """Return what a reader of the plan has to understand [count]."""
    used = (
        degrees.tp > 1, degrees.pp > 1, choice.zero > 0, choice.zero > 2, choice.shard is not None, choice.virtual > 1,
        choice.schedule not in ("1f1b",), choice.recompute != "none", choice.offload != "none",
    )  # fmt: skip
    return sum(used)


def key_of(step_s: float, num_used: int) -> tuple[float, int]:
    """Return what candidates are sorted by, from the time of a step and the number of strategies."""
    return step_s * (1 + _SIMPLER * num_used), num_used


def base_setup(model: ModelSpec, train: TrainSpec) -> Setup:
    """Return what all candidates have in common: the numerics. Stages are cut by their time, which is found fast."""
    return dataclasses.replace(Setup.of(model, Plan(precision=train.precision), train), cut_by_work=False)


def setup_of(base: Setup, degrees: Degrees, choice: Choice, train: TrainSpec) -> Setup:
    """Return the setup of a mix; it equals that of its plan, but for how stages are cut."""
    shard = (choice.shard or degrees.dp) if choice.zero else 1
    return base.with_fields(
        dp=degrees.dp,
        tp=degrees.tp,
        pp=degrees.pp,
        micro_batches=degrees.micro_batches,
        micro_batch_size=-(-train.global_batch_size // degrees.dp) / degrees.micro_batches,
        sequence_parallel=degrees.tp > 1,
        zero=choice.zero,
        shard=shard,
        schedule=choice.schedule,
        virtual=choice.virtual,
        recompute=run_again(choice.recompute),
        offloads_optimizer=choice.offload == "optimizer",
        replicas_gradient_bytes=base.sent_gradient_bytes if choice.zero and shard < degrees.dp else None,
        per_step=is_per_step(choice.zero, degrees.pp),
    )


def plan_of(candidate: Candidate, train: TrainSpec) -> Plan:
    """Return the plan of a mix."""
    degrees, choice = candidate.degrees, candidate.choice
    return Plan(
        dp=degrees.dp,
        tp=degrees.tp,
        pp=degrees.pp,
        micro_batches=degrees.micro_batches,
        zero=choice.zero,
        shard=choice.shard,
        schedule=choice.schedule,  # type: ignore[arg-type]
        virtual=choice.virtual,
        recompute=choice.recompute,  # type: ignore[arg-type]
        offload=choice.offload,  # type: ignore[arg-type]
        precision=train.precision,
    )
