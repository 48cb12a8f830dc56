"""Forecasts of what a rank sends in a step, worked out from the model beside a run of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.describe.batches import BatchSplitter
from meshwright.spec.plan import Plan

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """A step of the run that a forecast is made for."""

    plan: Plan
    batch: Any
    """As this rank got it."""
    num_samples: float
    """Samples in a step over all ranks, on average [count]."""
    splitter: BatchSplitter
    is_cross_entropy: bool
    """Whether the loss is cross-entropy: what another one gathers over shards is not known."""


class Forecast:
    """What one rank sends in a step, in three moments; the base class is that of one device, which sends nothing.

    It is made before a first step, which it may watch; it learns from what the rank holds while the plan is in force; and it
    tells once the model was closed, since a model is copied to be described, and copies must not run hooks.
    """

    learned_bytes = 0.0
    """What `learn` has found, where that is all [bytes]."""

    def end_watching(self) -> None:
        """Take note that the step which may be watched is over."""

    def learn(self, step: SeenStep) -> None:
        """Take what depends on what this rank holds. Nothing is exchanged."""

    def sent_bytes(self) -> float | None:
        """Return what this rank should send in such a step; None where there is no formula for it [bytes]."""
        return self.learned_bytes
