"""The side that starts a run: its folder, its ranks, its progress, and the exit code. Does not import torch itself."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from importlib import metadata
from typing import Any

from meshwright import __version__
from meshwright.errors import (
    CheckpointError,
    ConfigError,
    StoppedOnRequest,
    StorageError,
    exit_code_of,
)
from meshwright.host import usable_cores
from meshwright.ranks.capacity import check_devices
from meshwright.ranks.environment import read_place, read_restart_count
from meshwright.ranks.launch import launch
from meshwright.ranks.signals import StopSignals
from meshwright.spec.plan import Plan
from meshwright.spec.record import HeldTensor, Measurement, RunRecord
from meshwright.texts import clean
from meshwright.train.config.types import TrainConfig
from meshwright.train.events import WARM_UP_STEPS, RunDirectory
from meshwright.train.failures import one_line, report_failure
from meshwright.train.joined import join_job, train_beside
from meshwright.train.loggers.fan_out import Loggers
from meshwright.train.planning.choosing import foresee
from meshwright.train.planning.held_against import held_against
from meshwright.train.progress import ProgressView
from meshwright.train.report_at_end import RunReport
from meshwright.train.restarts import Restarts, wait
from meshwright.train.states_file import StatesFile

__all__: list[str] = []


def run_training(config: TrainConfig, *, resume: bool = False) -> int:
    """Train as the configuration says: start its ranks, or join the job that this process belongs to.

    Args:
        config: The configuration.
        resume: Whether to continue the run in the folder; one that has nothing of a run begins anew.

    Returns:
        The exit code: 0 done, 75 stopped on request; a failure's own code, after its traceback and a last line that
        begins with FATAL on the standard error.

    Raises:
        ConfigError: The plan does not fit the job that this process belongs to, or this machine.
        CheckpointError: There is a run to continue, and it has no checkpoint.
        DirectoryInUseError: Another run has the folder.
        StorageError: The folder cannot be written.
    """
    plan = config.plan
    place = read_place(os.environ)
    if place.is_of_job:
        if plan.num_ranks != place.world_size:
            raise ConfigError(
                f"the plan '{plan}' has {plan.num_ranks} ranks, this job ({place.source}) has {place.world_size}",
                fix=f"--plan dp={place.world_size}, or start {plan.num_ranks} ranks",
            )
        with contextlib.ExitStack() as end:
            if place.rank != 0:
                return train_beside(config, end)
            return _Run(config, end).execute(joined=True, resume=resume)
    check_devices(plan.num_devices, str(plan))
    with contextlib.ExitStack() as end:
        return _Run(config, end).execute(joined=False, resume=resume)


def train_on_rank(config_json: str, resume: bool = False) -> dict[str, Any]:
    """Train on this rank, which a launch has started; see `session.train`."""
    from meshwright.train.session import train

    return train(TrainConfig.model_validate_json(config_json), resume=resume)


class _Run:
    """One run as its folder and its viewer see it."""

    def __init__(self, config: TrainConfig, end: contextlib.ExitStack) -> None:
        self._config = config
        self._end = end
        self._plan = config.plan
        self._failures: dict[int, dict[str, Any]] = {}
        self._steps: list[dict[str, Any]] = []
        self._last_step = 0
        """Steps that are done, those before a resumption included [count]."""
        self._num_new_steps = 0
        """Steps that the ranks have done since they were started [count]."""
        self._is_continued = False
        self._saved: dict[str, Any] = {}
        """The newest checkpoint: the event that told of it."""
        self._held: dict[str, Any] = {}
        """What each rank holds: the event that told of it."""

    def execute(self, *, joined: bool, resume: bool) -> int:
        path = self._config.run_directory
        with RunDirectory(path) as directory:
            self._directory = directory
            self._states = StatesFile(path)
            settings = json.loads(self._config.model_dump_json(exclude={"plan"}))
            self._loggers = Loggers(self._config.train.log, path, self._config.run_name, settings)
            self._states.remove()
            if directory.doubt:
                sys.stderr.write(f"{clean(directory.doubt)}\n")
            resume = self._choose_start(directory, resume=resume)
            self._is_continued = resume
            self._foresee(joined=joined, resume=resume)
            self._write_record([])
            self._run_report = RunReport(in_background=not joined)
            self._end.callback(self._run_report.close)
            restarts = Restarts(0 if joined else self._config.train.max_restarts)
            with ProgressView(print_every=self._config.train.print_every) as self._view:
                while True:
                    try:
                        summaries = self._train(joined=joined, resume=resume)
                        leaving = self._end.enter_context(StopSignals())  # a run that is done stays done
                        break
                    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure becomes an exit code
                        progress = {"step": self._last_step, "num_new_steps": self._num_new_steps}
                        decision = restarts.after(error, told=one_line(error), **progress)
                        if decision.pause_s is None:
                            self._view.close()
                            return self._report(error, decision.reason)
                        self._tell_restart(error, restarts, decision.pause_s)
                        if wait(decision.pause_s):
                            self._view.close()
                            return self._report(StoppedOnRequest("stopped on request between two starts"))
                        resume = directory.has_checkpoints
            self._loggers.close(has_failed=False, is_hurried=lambda: leaving.first is not None)
            self._write_record(summaries)
            self._say_prediction(summaries)
            has_report = self._run_report.write(path)
            if any(summary["stopped"] for summary in summaries):
                return self._say_stopped(summaries[0]["step"])
            if resume and not self._num_new_steps:
                self._say(f"{path}: all {self._last_step} steps were done before; --set train.steps=N for more")
            else:
                report = ", report.html" if has_report else ""
                self._say(f"{path}: {len(self._steps)} steps in events.jsonl, record.json{report}")
        return 0

    def _choose_start(self, directory: RunDirectory, *, resume: bool) -> bool:
        """Return whether there is something to continue, and prepare the folder of the checkpoints for what comes."""
        restarted = read_restart_count(os.environ)
        if resume or restarted:
            resume = directory.has_checkpoints
            if not resume and not restarted and directory.has_steps:
                raise CheckpointError(
                    f"{directory.path} has the events of a run and no checkpoint to continue from",
                    fix="start it anew: leave out --resume",
                )
            if not resume:
                sys.stderr.write(f"{directory.path} has nothing to continue: the run begins anew\n")
        else:
            directory.set_events_aside()
            if (aside := directory.set_checkpoints_aside()) is not None:
                sys.stderr.write(f"checkpoints of a former run are in {aside} now; --resume would have continued it\n")
        if self._config.checkpoint.is_on:
            try:
                directory.try_checkpoints()
            except StorageError as error:
                if self._config.checkpoint.on_error == "stop":
                    raise
                sys.stderr.write(f"warning: no checkpoint can be written: {clean(error)}\n")
        return resume

    def _foresee(self, *, joined: bool, resume: bool) -> None:
        """Choose the plan where that is left to the planner, and predict what it costs; a run that goes on keeps its plan."""
        if resume and self._config.plan_is_auto and (kept := self._directory.read_plan()) is not None:
            self._config = self._config.model_copy(update={"plan": kept})
            lines = [f"plan auto: '{kept}', as this run began; --plan takes another"]
        else:
            self._config, lines = foresee(self._config, can_measure=not joined)
        self._plan = self._config.plan
        for line in lines:
            sys.stderr.write(f"{clean(line)}\n")

    def _say_prediction(self, summaries: list[dict[str, Any]]) -> None:
        prediction, measurement = self._config.plan.prediction, self._record(summaries).measurement
        if prediction is None or measurement is None:
            return
        text = held_against(
            prediction,
            step_s=measurement.step_s,
            peak_bytes=measurement.peak_memory_bytes,
            sent_bytes=summaries[0]["step_sent_bytes"],
        )
        self._say(f"prediction: {text}")

    def _train(self, *, joined: bool, resume: bool) -> list[dict[str, Any]]:
        self._failures.clear()
        self._num_new_steps = 0
        if joined:
            return [join_job(self._config, self._on_event, self._end, resume=resume, states=self._states)]
        return self._launch(resume=resume)

    def _tell_restart(self, error: BaseException, restarts: Restarts, pause_s: float) -> None:
        self._on_event(
            0,
            {
                "event": "restarting",
                "time": time.time(),
                "step": self._last_step,
                "number": restarts.num_done,
                "most": restarts.most,
                "pause_s": pause_s,
                "exit_code": exit_code_of(error),
                "cause": one_line(error),
            },
        )

    def _launch(self, *, resume: bool) -> list[dict[str, Any]]:
        # In the one-process modes every device is a thread that computes, so they share the cores like ranks do.
        threads = max(1, usable_cores() // self._plan.num_devices) if self._plan.num_ranks == 1 else None
        if "OMP_NUM_THREADS" in os.environ:
            threads = None
        return launch(
            train_on_rank,
            self._plan.num_ranks,
            self._config.model_dump_json(),
            resume,
            threads_per_rank=threads,
            timeout_s=self._config.train.timeout_s,
            on_event=self._on_event,
            on_beats=self._states.note,
        )

    def _on_event(self, rank: int, event: dict[str, Any]) -> None:
        self._directory.write_event(event)
        self._loggers.take(event)
        if event["event"] == "failed":
            self._failures[rank] = event
        elif event["event"] == "step":
            self._steps.append(event)
            self._last_step = event["step"]
            self._num_new_steps += 1
        elif event["event"] == "resumed":
            self._last_step = event["step"]
            self._saved = {"path": event["checkpoint"], "step": event["step"]}
        elif event["event"] == "run_started":
            self._last_step = 0
        elif event["event"] == "saved":
            self._saved = event
        elif event["event"] == "planned":
            self._plan = Plan.from_dict(event["plan"])
        elif event["event"] == "held":
            self._held = event
        self._view.show(event)

    def _write_record(self, summaries: list[dict[str, Any]]) -> None:
        """Write record.json; a run that is continued keeps the one that it has until it has done a step more."""
        if not (self._is_continued and not self._steps and self._directory.has_record):
            self._directory.write_record(self._record(summaries))

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
                num_sent_steps=self._num_new_steps if summaries else 0,
                rank_peak_memory_bytes=tuple(summary["peak_memory_bytes"] for summary in summaries),
                rank_wait_s=_of_each(summaries, "wait_s"),
                held_bytes=_fullest(summaries),
                num_skipped_steps=sum(step["skipped"] for step in self._steps),
                loss=loss if loss is not None and abs(loss) < float("inf") else None,
            )
        config = json.loads(self._config.model_dump_json(exclude={"plan"}))
        return RunRecord(
            plan=self._plan,
            config=config,
            prediction=self._config.plan.prediction,
            measurement=measurement,
            environment=environment(),
            tensors={name: HeldTensor.from_dict(entry) for name, entry in self._held.get("tensors", {}).items()},
            num_tensors_left_out=self._held.get("num_left_out", 0),
        )

    def _say(self, text: str) -> None:
        self._view.note(text)

    def _say_stopped(self, step: int) -> int:
        where = f"stopped on request after step {step} of {self._config.train.steps}"
        if not self._saved:
            error = StoppedOnRequest(
                f"{where}; nothing was saved", fix="checkpoint.at_end = true saves where a run stops"
            )
        else:
            saved = "saved" if step == self._saved["step"] else f"saved after step {self._saved['step']}"
            error = StoppedOnRequest(f"{where}; {saved} in {self._saved['path']}", fix="continue it: --resume")
        sys.stderr.write(f"{clean(error)}\n")
        return error.exit_code

    def _report(self, error: BaseException, remark: str = "") -> int:
        leaving = self._end.enter_context(StopSignals())
        is_stop = isinstance(error, StoppedOnRequest)
        if is_stop:
            code = self._say_stopped(self._last_step)
        else:
            if remark:
                sys.stderr.write(f"{remark}\n")
            code = report_failure(self._config, error, self._failures, last_step=self._last_step)
        self._loggers.close(has_failed=not is_stop, is_hurried=lambda: leaving.first is not None)
        try:  # afterwards: a disk that fails now is not what the run ended of
            self._write_record([])
            if not is_stop:
                self._directory.write_event({"event": "run_failed", "exit_code": code, "cause": one_line(error)})
            self._run_report.write(self._directory.path)
            self._directory.close()
        except StorageError as storage:
            sys.stderr.write(f"and afterwards: {clean(storage)}\n")
        return code


def _of_each(summaries: list[dict[str, Any]], name: str) -> tuple[float, ...]:
    """Return a number of every rank; () where one of them has none."""
    numbers = [summary[name] for summary in summaries if summary.get(name) is not None]
    return tuple(numbers) if len(numbers) == len(summaries) else ()


def _fullest(summaries: list[dict[str, Any]]) -> dict[str, int]:
    """Return what the rank holds that holds the most."""
    held = [summary.get("held_bytes", {}) for summary in summaries]
    return max(held, key=lambda entry: sum(entry.values()), default={})


def environment() -> dict[str, Any]:
    """Return versions, host and cores, for the record."""
    return {
        "meshwright": __version__,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": usable_cores(),
    }
