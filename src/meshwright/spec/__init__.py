"""Values that pass between describe, plan, apply, run, measure and report: frozen, versioned, JSON both ways. Free of torch.

model       what a model is
plan        what is to be done with it
plan_text   the one-line form of a plan
supported   what this version can apply
prediction  what a step should take
train       what training needs besides
record      what a run gave

To add a key of plans: a field in `plan.py`, its word in `plan_text.py`.
"""

from meshwright.spec.model import LayerSpec, ModelSpec, SharedParameter
from meshwright.spec.plan import Plan
from meshwright.spec.prediction import MemoryBreakdown, Prediction, TimeBreakdown
from meshwright.spec.record import Measurement, RunRecord
from meshwright.spec.train import TrainSpec

__all__ = [
    "LayerSpec",
    "Measurement",
    "MemoryBreakdown",
    "ModelSpec",
    "Plan",
    "Prediction",
    "RunRecord",
    "SharedParameter",
    "TimeBreakdown",
    "TrainSpec",
]
