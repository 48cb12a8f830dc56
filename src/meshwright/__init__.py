"""Meshwright trains any PyTorch model on any set of devices.

    describe  ->  plan  ->  apply  ->  run  ->  measure  ->  report
    nn.Module     ModelSpec    Plan      ParallelModel  RunRecord   text, JSON, HTML
                  + Cluster    + module

The public names are listed in ``__all__`` and load when they are first used, so ``import meshwright`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from meshwright.comm.shm.backend import register_shm
    from meshwright.compare.run_plans import compare_plans
    from meshwright.describe.batches import split_batch
    from meshwright.describe.describing import describe_model
    from meshwright.errors import (
        ApplyError,
        CheckpointError,
        ConfigError,
        CorruptionError,
        DirectoryInUseError,
        InternalError,
        LostPeerError,
        MeshwrightError,
        MissingDependencyError,
        NonFiniteError,
        PlanError,
        StoppedOnRequest,
        StorageError,
        UserCodeError,
        WorkerKilledError,
    )
    from meshwright.hardware import ClusterSpec, DeviceSpec, LinkSpec, load_cluster
    from meshwright.measure.probe import probe_cluster
    from meshwright.measure.verify import ParityReport, verify_plan
    from meshwright.mesh import MeshSpec
    from meshwright.plan.search.ranking import make_plans, predict_plan
    from meshwright.plan.search.select import select_strategy
    from meshwright.ranks.join import join_world
    from meshwright.ranks.launch import launch
    from meshwright.ranks.world import current_world
    from meshwright.run.accumulate import GradientAccumulation
    from meshwright.run.applying import apply_plan
    from meshwright.run.checkpoints.loading import load_checkpoint
    from meshwright.run.checkpoints.saving import save_checkpoint, wait_for_checkpoint
    from meshwright.run.gather_batch import gather_batch
    from meshwright.run.losses.loss import Loss
    from meshwright.run.parallel_model import ParallelModel
    from meshwright.run.result import StepResult
    from meshwright.run.step_trace import trace_steps
    from meshwright.schedule import PipelineSchedule
    from meshwright.spec import ModelSpec, Plan, Prediction, RunRecord, TrainSpec
    from meshwright.train.data.loader import make_loader

__version__ = "0.2.0"

__all__ = [
    "ApplyError",
    "CheckpointError",
    "ClusterSpec",
    "ConfigError",
    "CorruptionError",
    "DeviceSpec",
    "DirectoryInUseError",
    "GradientAccumulation",
    "InternalError",
    "LinkSpec",
    "Loss",
    "LostPeerError",
    "MeshSpec",
    "MeshwrightError",
    "MissingDependencyError",
    "ModelSpec",
    "NonFiniteError",
    "ParallelModel",
    "ParityReport",
    "PipelineSchedule",
    "Plan",
    "PlanError",
    "Prediction",
    "RunRecord",
    "StepResult",
    "StoppedOnRequest",
    "StorageError",
    "TrainSpec",
    "UserCodeError",
    "WorkerKilledError",
    "apply_plan",
    "compare_plans",
    "current_world",
    "describe_model",
    "gather_batch",
    "join_world",
    "launch",
    "load_checkpoint",
    "load_cluster",
    "make_loader",
    "make_plans",
    "predict_plan",
    "probe_cluster",
    "register_shm",
    "save_checkpoint",
    "select_strategy",
    "split_batch",
    "trace_steps",
    "verify_plan",
    "wait_for_checkpoint",
]

_NAMES_OF_MODULE: Final = {
    "ranks.launch": ("launch",),
    "comm.shm.backend": ("register_shm",),
    "ranks.world": ("current_world",),
    "ranks.join": ("join_world",),
    "errors": (
        "ApplyError",
        "CheckpointError",
        "ConfigError",
        "CorruptionError",
        "DirectoryInUseError",
        "InternalError",
        "LostPeerError",
        "MeshwrightError",
        "MissingDependencyError",
        "NonFiniteError",
        "PlanError",
        "StoppedOnRequest",
        "StorageError",
        "UserCodeError",
        "WorkerKilledError",
    ),
    "hardware": ("ClusterSpec", "DeviceSpec", "LinkSpec", "load_cluster"),
    "measure.probe": ("probe_cluster",),
    "measure.verify": ("ParityReport", "verify_plan"),
    "mesh": ("MeshSpec",),
    "plan.search.ranking": ("make_plans", "predict_plan"),
    "plan.search.select": ("select_strategy",),
    "run.accumulate": ("GradientAccumulation",),
    "describe.batches": ("split_batch",),
    "describe.describing": ("describe_model",),
    "run.checkpoints.loading": ("load_checkpoint",),
    "run.checkpoints.saving": ("save_checkpoint", "wait_for_checkpoint"),
    "run.gather_batch": ("gather_batch",),
    "run.losses.loss": ("Loss",),
    "run.applying": ("apply_plan",),
    "run.parallel_model": ("ParallelModel",),
    "run.result": ("StepResult",),
    "run.step_trace": ("trace_steps",),
    "schedule": ("PipelineSchedule",),
    "spec": ("ModelSpec", "Plan", "Prediction", "RunRecord", "TrainSpec"),
    "compare.run_plans": ("compare_plans",),
    "train.data.loader": ("make_loader",),
}
_MODULE_OF_NAME: Final = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}
_SUBMODULES: Final = ("nn", "testing")


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name in _SUBMODULES:
        return importlib.import_module(f"meshwright.{name}")
    if name not in _MODULE_OF_NAME:
        from meshwright.errors import did_you_mean

        raise AttributeError(f"module 'meshwright' has no attribute '{name}'{did_you_mean(name, __all__)}")
    value = getattr(importlib.import_module(f"meshwright.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
