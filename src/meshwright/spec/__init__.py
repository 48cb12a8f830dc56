"""Values that pass between describe, plan, apply, run, measure and report. Free of torch.

They are frozen and versioned, and convert to JSON and back.

model       the model, without weights
layer       its layers, and the parameters that they share
operator    operators of a layer
layer_operators builder of a layer from sizes
transformer layers of a transformer, from its sizes
plan        the plan
plan_text   the one-line form of a plan
supported   the plans that this version can apply
prediction  the expected cost of a step
train       settings of a training beside the model
record      the record of a run
timeline    traced steps as a file
rank_states what each rank of a run is doing, as a file

To add a key of plans, add a field in `plan.py`, and its word in `plan_text.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.spec.layer import HostCalls, LayerBond, LayerSpec, SharedParameter
from meshwright.spec.model import ModelSpec
from meshwright.spec.operator import OperatorSpec
from meshwright.spec.plan import Plan
from meshwright.spec.prediction import MemoryBreakdown, Prediction, TimeBreakdown
from meshwright.spec.train import TrainSpec

if TYPE_CHECKING:
    from meshwright.spec.record import Measurement, RunRecord

__all__ = [
    "HostCalls",
    "LayerBond",
    "LayerSpec",
    "Measurement",
    "MemoryBreakdown",
    "ModelSpec",
    "OperatorSpec",
    "Plan",
    "Prediction",
    "RunRecord",
    "SharedParameter",
    "TimeBreakdown",
    "TrainSpec",
]


def __getattr__(name: str) -> Any:
    """Load a record's classes when they are first used (PEP 562): a plan has none."""
    if name not in ("Measurement", "RunRecord"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from meshwright.spec import record

    value = globals()[name] = getattr(record, name)
    return value
