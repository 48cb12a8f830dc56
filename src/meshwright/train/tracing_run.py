"""Trace of a run's steps, as `train.trace` asks for it: runs/NAME/trace.json and the event `traced`."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from meshwright.errors import StorageError
from meshwright.run.parallel_model import ParallelModel
from meshwright.run.step_trace import StepTrace, write_trace
from meshwright.spec.timeline import TRACE_FILE
from meshwright.train.config.traced_steps import traced_steps
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []


class RunTrace:
    """Records the steps that a configuration names; every rank calls the same methods.

    Args:
        config: The configuration.
        model: The model.
        first_step: Steps that were done before this process began [count].
    """

    def __init__(self, config: TrainConfig, model: ParallelModel, first_step: int) -> None:
        steps = traced_steps(config.train.trace)
        self._steps = range(max(steps.start, first_step + 1), steps.stop) if steps else steps
        self._path = config.run_directory / TRACE_FILE
        self._model = model
        self._has_profiler = config.train.profiler
        self._trace: StepTrace | None = None

    def begin_step(self, step: int) -> float:
        """Begin to record where this step is the first one to be recorded; return how long that took [s]."""
        if not self._steps or step != self._steps[0]:
            return 0.0
        began = time.perf_counter()
        self._trace = StepTrace(self._model, profiler=self._has_profiler)
        self._trace.begin()
        return time.perf_counter() - began

    def end_step(self, step: int, *, is_end: bool) -> list[dict[str, Any]]:
        """Write the trace after the last of the steps, or where the run ends; return the events that tell of it.

        A disk that is full takes the trace, and not the run.
        """
        if self._trace is None or not (is_end or step == self._steps[-1]):
            return []
        began = time.perf_counter()
        found = self._trace.end()
        self._trace = None
        if found is None:
            return []
        facts = found["otherData"]
        self._remove_rests()
        try:
            write_trace(found, self._path)
        except StorageError as error:
            return [{"event": "trace_failed", "step": step, "text": str(error)}]
        return [
            {
                "event": "traced",
                "step": step,
                "steps": facts["steps"],
                "path": str(self._path),
                "id": facts["id"],
                "num_left_out": facts["num_left_out"],
                "seconds": time.perf_counter() - began,
            }
        ]

    def _remove_rests(self) -> None:
        """Remove what a run left of its trace that was killed while it wrote; the folder is this run's alone."""
        for rest in self._path.parent.glob(f".{self._path.name}.*.partial"):
            with contextlib.suppress(OSError):
                rest.unlink()

    def close(self) -> None:
        """Stop recording; nothing is exchanged."""
        if self._trace is not None:
            self._trace.stop()
