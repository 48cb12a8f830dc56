"""The values that pass between describe, plan, apply, run, measure and report: frozen, versioned, JSON both ways."""

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
