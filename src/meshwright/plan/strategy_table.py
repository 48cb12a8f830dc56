"""Table of strategies: every preset on the same devices beside one of them, as tutorials of distributed training show it."""

from __future__ import annotations

from typing import Final

from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec
from meshwright.plan.search.ranking import USABLE_FRACTION, predict_plan
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.prediction import Prediction
from meshwright.spec.train import TrainSpec
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []

STRATEGIES: Final = (
    "data_parallel",
    "model_parallel",
    "distributed",
    "zero1",
    "zero2",
    "zero3",
    "tensor",
    "pipeline",
    "hybrid",
)

_HEAD: Final = ("strategy", "plan", "step", "speed-up", "memory", "of one", "sent a step", "fits")


def strategy_table(spec: ModelSpec, cluster: ClusterSpec, train: TrainSpec) -> str:
    """Return what each preset on all devices is expected to cost, beside the same batch on one device.

    Speed-up is the step of one device over that of the strategy, memory the fullest device's peak and its ratio to that of one
    device, and what is sent the mean of a rank; of one process all that its devices send.

    Raises:
        ConfigError: One device cannot be costed.
    """
    one = predict_plan(spec, cluster, train, Plan(precision=train.precision))
    limit = USABLE_FRACTION * cluster.device.memory_bytes
    rows = [_HEAD, _row("single", Plan(precision=train.precision), one, one, limit)]
    refused: list[str] = []
    for name in STRATEGIES:
        try:
            plan = Plan.preset(name, cluster.num_devices).replace(precision=train.precision)
            rows.append(_row(name, plan, predict_plan(spec, cluster, train, plan), one, limit))
        except ConfigError as error:
            refused.append(f"{name}: {error.message}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{spec}", f"{cluster}, {train.global_batch_size} samples a step", "", *lines, *refused])


def _row(name: str, plan: Plan, found: Prediction, one: Prediction, limit_bytes: float) -> tuple[str, ...]:
    return (
        name,
        str(plan),
        format_seconds(found.step_s),
        f"{one.step_s / found.step_s:.2f}",
        format_bytes(found.peak_bytes),
        f"{found.peak_bytes / one.peak_bytes:.2f}",
        format_bytes(sum(found.sent_bytes.values())),
        "yes" if found.peak_bytes <= limit_bytes else f"no, {format_bytes(found.peak_bytes - limit_bytes)} too much",
    )
