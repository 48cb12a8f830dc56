"""Logger of MLflow, by the package `mlflow`; in the run's folder `mlruns` where no MLFLOW_TRACKING_URI is set."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__: list[str] = []

FOLDER: Final = "mlruns"
EXPERIMENT: Final = "meshwright"
_MOST_TEXT: Final = 5000


class MlflowLog:
    """Logs to one run of MLflow.

    Args:
        folder: The run's folder.
        name: The run's name.
        settings: The run's configuration.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric: Any = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / FOLDER).absolute().as_uri()
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # MLflow 3.7 and later refuse folders without it; its other stores need a database that mlflow-skinny lacks.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client: Any = MlflowClient(tracking_uri=uri)
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self._client.get_experiment_by_name(wanted)
        experiment = self._client.create_experiment(wanted) if found is None else found.experiment_id
        self._run: str = self._client.create_run(experiment, run_name=name).info.run_id
        params = [Param(key, _text(value)) for key, value in _flat(settings)][:100]
        self._client.log_batch(self._run, params=params, tags=[RunTag("folder", str(folder))])

    def begin(self, step: int) -> None:
        """Note where the run goes on."""
        if step:
            self._client.set_tag(self._run, "resumed_after_step", str(step))

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log the numbers of a step."""
        milliseconds = math.floor(at * 1000)
        found = [self._metric(name, value, milliseconds, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=found)

    def end(self, *, has_failed: bool) -> None:
        """End MLflow's run."""
        self._client.set_terminated(self._run, status="FAILED" if has_failed else "FINISHED")


def _flat(settings: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Return the settings as "section.key" and value."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        name = f"{before}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:_MOST_TEXT]
