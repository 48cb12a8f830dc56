"""Plans that this version can apply. Free of torch, so that others are refused before anything starts."""

from __future__ import annotations

from meshwright.errors import ApplyError
from meshwright.spec.plan import Plan

__all__: list[str] = []


def refuse_unbuilt(plan: Plan) -> None:
    """Raise ApplyError for parts of a plan that this version cannot apply yet."""
    if plan.cp > 1:
        raise ApplyError(
            f"the plan '{plan}' asks for cp={plan.cp}, which this version cannot apply; it applies data parallelism "
            "(dp with zero=0 to 3, data_parallel), tensor parallelism (tp), pipelines (pp), layers over devices "
            "(model_parallel), micro_batches, recompute and precision",
            fix=f"use the plan 'dp={plan.num_devices}'",
        )
