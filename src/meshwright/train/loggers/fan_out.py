"""Loggers of a run and the numbers that they get from its events. Never imports torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from meshwright.errors import MissingDependencyError
from meshwright.train.loggers.feeding import Feeder

__all__: list[str] = []

PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "csv": ""}
"""Logger -> the package that it needs; "" for none."""

STEP_METRICS: Final = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "seconds": "train/step_s",
    "samples_per_s": "train/samples_per_s",
    "tokens_per_s": "train/tokens_per_s",
    "peak_memory_bytes": "train/peak_memory_bytes",
}
"""Field of the event `step` -> name of the metric."""
EVALUATION_METRICS: Final = {"loss": "eval/loss", "seconds": "eval/seconds"}


class Logger(Protocol):
    """What a logger is told."""

    def begin(self, step: int) -> None:
        """The run goes on after this step; what was logged of later ones is undone. 0: it begins."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Numbers of a step: metric -> value, and when they were told, seconds since 1970."""
        ...

    def end(self, *, has_failed: bool) -> None:
        """The run is over."""
        ...


def require_packages(names: tuple[str, ...]) -> None:
    """Refuse loggers whose package is not installed.

    Raises:
        MissingDependencyError: One is missing.
    """
    for name in names:
        package = PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"train.log = '{name}' needs the package '{package}'", fix=f"pip install 'meshwright[{name}]'"
            )


class Loggers:
    """The loggers of one run. Each has a thread of its own: what it waits for, the run does not wait for.

    Args:
        names: Which.
        folder: The run's folder.
        name: The run's name.
        settings: Its configuration, as plain data.
    """

    def __init__(self, names: tuple[str, ...], folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self._about = (folder, name, settings)
        self._feeders = {name: Feeder(name) for name in names}
        self._loggers: dict[str, Logger] = {}
        self._has_begun = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Tell the loggers of an event of the run; returns at once."""
        kind = event["event"]
        if not self._feeders or kind not in ("run_started", "resumed", "step", "evaluated"):
            return
        if kind in ("run_started", "resumed"):
            self._begin(event["step"] if kind == "resumed" else 0)
            return
        names = STEP_METRICS if kind == "step" else EVALUATION_METRICS
        metrics = {name: float(event[field]) for field, name in names.items() if event.get(field) is not None}
        at = float(event["time"])
        self._each(lambda logger: logger.log(event["step"], metrics, at))

    def close(self, *, has_failed: bool, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Tell them that the run is over, and wait until they are through.

        Args:
            has_failed: How it ended.
            is_hurried: Whether the process is asked to end: then it waits for a second at most.
        """
        self._each(lambda logger: logger.end(has_failed=has_failed))
        for feeder in self._feeders.values():
            feeder.close(is_hurried=is_hurried)
        self._feeders.clear()

    def _begin(self, step: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            for name, feeder in self._feeders.items():
                feeder.add(lambda name=name: self._open(name))
        self._each(lambda logger: logger.begin(step))

    def _open(self, name: str) -> None:
        self._loggers[name] = _make(name, *self._about)

    def _each(self, do: Callable[[Logger], None]) -> None:
        if self._has_begun:
            for name, feeder in self._feeders.items():
                feeder.add(lambda name=name: do(self._loggers[name]))


def _make(name: str, folder: Path, run_name: str, settings: Mapping[str, Any]) -> Logger:
    if name == "tensorboard":
        from meshwright.train.loggers.tensorboard_log import TensorBoardLog

        return TensorBoardLog(folder)
    if name == "wandb":
        from meshwright.train.loggers.wandb_log import WandbLog

        return WandbLog(folder, run_name, settings)
    if name == "mlflow":
        from meshwright.train.loggers.mlflow_log import MlflowLog

        return MlflowLog(folder, run_name, settings)
    from meshwright.train.loggers.metrics_csv import MetricsCsv

    return MetricsCsv(folder)
