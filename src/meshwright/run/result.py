"""Result of one step."""

from __future__ import annotations

import dataclasses

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one step, equal on every rank but for `seconds`."""

    loss: float
    """Sum of losses over sum of weights, of the whole global batch."""
    grad_norm: float
    """2-norm of the whole gradient, before clipping."""
    num_samples: int
    """Samples in the global batch [count]."""
    num_tokens: int
    """Elements of the integer input, for token models; else the samples [count]."""
    seconds: float
    """Time that this rank spent in the step [s]."""
    skipped: bool
    """Whether the optimizer was left out because the gradient was not finite."""
    findings: tuple[str, ...] = ()
    """What sentinels found in this step, where they warn."""
