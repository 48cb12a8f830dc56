"""The side that starts a run: its folder, its ranks, its progress, and the exit code. Does not import torch itself."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwright.errors import (
    ConfigError,
    MeshwrightError,
    RankNote,
    StoppedOnRequest,
    StorageError,
    exit_code_of,
    rank_of,
)
from meshwright.host import usable_cores
from meshwright.ranks.environment import read_place
from meshwright.ranks.launch import launch
from meshwright.spec.plan import Plan
from meshwright.spec.record import Measurement, RunRecord
from meshwright.train.config.types import TrainConfig
from meshwright.train.events import RunDirectory
from meshwright.train.progress import ProgressView, clean

__all__: list[str] = []

WARM_UP_STEPS = 3


def run_training(config: TrainConfig) -> int:
    """Train as the configuration says: start its ranks, or join the job that this process belongs to.

    Returns:
        The exit code: 0 done, 75 stopped on request; a failure's own code, after its traceback and a last line that
        begins with FATAL on the standard error.

    Raises:
        ConfigError: The plan does not fit the job that this process belongs to.
        DirectoryInUseError: Another run has the folder.
        StorageError: The folder cannot be written.
    """
    plan = config.plan
    place = read_place(os.environ)
    if place.world_size > 1 or place.address is not None:
        if plan.num_ranks != place.world_size:
            raise ConfigError(
                f"the plan '{plan}' has {plan.num_ranks} ranks, this job ({place.source}) has {place.world_size}",
                fix=f"--plan dp={place.world_size}, or start {plan.num_ranks} ranks",
            )
        if place.rank != 0:
            return _train_beside(config)
        return _Run(config).execute(joined=True)
    return _Run(config).execute(joined=False)


def _train_beside(config: TrainConfig) -> int:
    """Train on a rank that is not the job's first: that one writes the folder and draws."""
    failures: dict[int, dict[str, Any]] = {}

    def on_event(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "failed":
            failures[rank] = event

    try:
        summary = _join(config, on_event)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure becomes an exit code
        return _report_failure(config, error, failures)
    return StoppedOnRequest.exit_code if summary["stopped"] else 0


def _join(config: TrainConfig, on_event: Callable[[int, dict[str, Any]], None]) -> dict[str, Any]:
    """Train in this process, which belongs to a job; return what this rank did."""
    from meshwright.ranks.join import join_world
    from meshwright.train.session import train

    world = join_world()
    world.on_event = on_event
    try:
        return train(config, world)
    except Exception as error:
        if rank_of(error) is None:
            error.add_note(RankNote(f"rank {world.rank} of {world.world_size}", world.rank))
        raise


def train_on_rank(config_json: str) -> dict[str, Any]:
    """Train on this rank, which a launch has started; see `session.train`."""
    from meshwright.train.session import train

    return train(TrainConfig.model_validate_json(config_json))


class _Run:
    """One run as its folder and its viewer see it."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._plan = config.plan
        self._last: dict[str, Any] = {}
        self._failures: dict[int, dict[str, Any]] = {}
        self._steps: list[dict[str, Any]] = []

    def execute(self, *, joined: bool) -> int:
        path = Path(self._config.train.directory) / self._config.run_name
        with RunDirectory(path) as directory:
            self._directory = directory
            directory.write_record(self._record([]))
            with ProgressView(print_every=self._config.train.print_every) as self._view:
                try:
                    summaries = [_join(self._config, self._on_event)] if joined else self._launch()
                except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure becomes an exit code
                    self._view.close()
                    return self._report(error)
            directory.write_record(self._record(summaries))
            if any(summary["stopped"] for summary in summaries):
                return self._say_stopped(summaries[0]["step"])
            self._say(f"{path}: {len(self._steps)} steps in events.jsonl, record.json")
        return 0

    def _launch(self) -> list[dict[str, Any]]:
        # In the one-process modes every device is a thread that computes, so they share the cores like ranks do.
        threads = max(1, usable_cores() // self._plan.num_devices) if self._plan.num_ranks == 1 else None
        if "OMP_NUM_THREADS" in os.environ:
            threads = None
        return launch(
            train_on_rank,
            self._plan.num_ranks,
            self._config.model_dump_json(),
            threads_per_rank=threads,
            on_event=self._on_event,
        )

    def _on_event(self, rank: int, event: dict[str, Any]) -> None:
        self._directory.write_event(event)
        if event["event"] == "failed":
            self._failures[rank] = event
        elif event["event"] == "step":
            self._steps.append(event)
        elif event["event"] == "planned":
            self._plan = Plan.from_dict(event["plan"])
        self._last = event
        self._view.show(event)

    def _record(self, summaries: list[dict[str, Any]]) -> RunRecord:
        measured = self._steps[WARM_UP_STEPS:] or self._steps
        measurement = None
        if measured:
            peaks = [summary["peak_memory_bytes"] for summary in summaries] or [measured[-1]["peak_memory_bytes"]]
            loss = measured[-1]["loss"]
            measurement = Measurement(
                step_seconds=tuple(step["seconds"] for step in measured),
                num_samples=sum(step["num_samples"] for step in measured),
                num_tokens=sum(step["num_tokens"] for step in measured),
                peak_memory_bytes=max(peaks),
                sent_bytes=summaries[0]["sent_bytes"] if summaries else {},
                loss=loss if loss is not None and abs(loss) < float("inf") else None,
            )
        config = json.loads(self._config.model_dump_json(exclude={"plan"}))
        return RunRecord(plan=self._plan, config=config, measurement=measurement, environment=environment())

    def _say(self, text: str) -> None:
        self._view.note(text)

    def _say_stopped(self, step: int) -> int:
        error = StoppedOnRequest(
            f"stopped on request after step {step} of {self._config.train.steps}; nothing was saved, since this version "
            "has no checkpoints"
        )
        sys.stderr.write(f"{error}\n")
        return error.exit_code

    def _report(self, error: BaseException) -> int:
        is_stop = isinstance(error, StoppedOnRequest)
        if is_stop:
            code = self._say_stopped(int(self._last.get("step", 0)))
        else:
            code = _report_failure(self._config, error, self._failures, last_step=len(self._steps))
        try:  # afterwards: a disk that fails now is not what the run ended of
            self._directory.write_record(self._record([]))
            if not is_stop:
                self._directory.write_event({"event": "run_failed", "exit_code": code, "cause": one_line(error)})
            self._directory.close()
        except StorageError as storage:
            sys.stderr.write(f"and afterwards: {clean(storage)}\n")
        return code


def _report_failure(
    config: TrainConfig, error: BaseException, failures: Mapping[int, dict[str, Any]], last_step: int = 0
) -> int:
    """Write a failure to the standard error: the guilty rank's traceback, the message, and one last line for machines."""
    rank = rank_of(error)
    told = failures.get(rank, {}) if rank is not None else {}
    is_ours = isinstance(error, MeshwrightError)
    trace = told.get("traceback") or getattr(error, "traceback_text", "")
    # Nobody who pressed Ctrl-C twice wants to know where.
    if not trace and not is_ours and not isinstance(error, KeyboardInterrupt):
        trace = "".join(traceback.format_exception(error))
    step, phase = told.get("step"), told.get("phase")
    if is_ours and not told:
        step, phase = error.step, error.phase
    step, phase = last_step if step is None else step, phase or "run"
    lines = [trace.rstrip(), clean(error) if is_ours else ""]
    name = re.sub(r"\s", "_", config.run_name)
    lines.append(
        f"FATAL run={name} rank={'unknown' if rank is None else rank} step={step} phase={phase} cause={one_line(error)}"
    )
    sys.stderr.write(clean("\n".join(line for line in lines if line)) + "\n")
    sys.stderr.flush()
    return exit_code_of(error)


def one_line(error: BaseException) -> str:
    """Return an exception's type, the first line of its text and what is noted about it, without control characters."""
    notes = [str(note) for note in getattr(error, "__notes__", ()) if not isinstance(note, RankNote)]
    parts = [clean(part).strip().partition("\n")[0][:300] for part in (error, *notes)]
    text = "; ".join(part for part in parts if part)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def environment() -> dict[str, Any]:
    """Return versions, host and cores, for the record."""
    return {
        "meshwright": metadata.version("meshwright"),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": usable_cores(),
    }
