"""`compare_plans`: the same training under several plans, one after another.

Every plan runs in processes of its own, so that a peak of memory belongs to that plan alone. All plans use the same cores: a
plan over n devices computes with 1/n of them on each. This module imports torch only to refuse plans that cannot be applied.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.compare.comparison import Comparison, make_comparison, pace_notes
from meshwright.compare.rows import Trial
from meshwright.errors import ConfigError, MeshwrightError, StoppedOnRequest
from meshwright.host import processor_name, usable_cores
from meshwright.ranks.capacity import check_devices
from meshwright.ranks.environment import read_place
from meshwright.ranks.launch import launch
from meshwright.spec.plan import Plan
from meshwright.texts import clean
from meshwright.train.config.checks import check_config, resolve_plan
from meshwright.train.config.deepspeed import require_same_training, show_rows
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainConfig
from meshwright.train.failures import one_line
from meshwright.train.launcher import environment
from meshwright.train.planning.choosing import choose
from meshwright.train.planning.predictor import Foreseen, Predictor
from meshwright.train.planning.this_machine import is_switched_off
from meshwright.train.progress import ProgressView

if TYPE_CHECKING:
    from meshwright.compare.trial import RankSamples

__all__: list[str] = []

WARM_UP_STEPS = 3
"""Steps that are not counted [count]: the first ones allocate, choose kernels, and order gradient buckets."""

MOST_STEPS = 100
"""A run of up to this many steps is measured whole [count]."""

DEFAULT_STEPS = 30
"""Measured steps of a longer run [count]."""


def compare_plans(
    config: str | Path | TrainConfig,
    plans: Sequence[str],
    *,
    steps: int | None = None,
    overrides: Sequence[str] = (),
) -> Comparison:
    """Train under several plans, one after another, on the same data, and compare them.

    Missing runs of ``single`` are added as baselines: with all the cores, and on the CPU with the cores of one device of each
    plan. A plan that fails becomes a row that says so.

    Args:
        config: A TOML file, or a checked configuration.
        plans: One-line plans; a preset is spread over the configuration's devices.
        steps: Measured steps of each plan; None: all of the configuration's up to 100, else 30 [count].
        overrides: "section.key=value", each replacing what the file says.

    Returns:
        The comparison; ``str()`` of it is the table.

    Raises:
        ConfigError: The configuration or a plan is wrong, before anything has started.
        ApplyError: A plan asks for what this version cannot do.
        StoppedOnRequest: A signal asked to stop.
        Exception: What the first plan raised, where none of them ran.

    Example:
        >>> print(mw.compare_plans("examples/mlp_classic.toml", ["single", "model_parallel"]))  # doctest: +SKIP
    """
    if not isinstance(config, TrainConfig):
        config = load_config(config, overrides)
    elif overrides:
        raise ConfigError("overrides are for a configuration file, this configuration has been checked already")
    comparison, errors = Runs(config, plans, steps, None).compare()
    if len(errors) == sum(not row.trial.is_baseline for row in comparison.rows):
        raise errors[0]
    return comparison


def run_trials(config: TrainConfig, plans: Sequence[Plan], steps: int, view: ProgressView | None) -> list[Trial]:
    """Run a configuration under some plans for a few steps each, one after another, without anything to compare with.

    Raises:
        ConfigError: A plan does not fit the configuration.
        StoppedOnRequest: A signal asked to stop.
        Exception: What the first plan raised, where none of them ran.
    """
    runs = Runs(config, [str(plan) for plan in plans], steps, view, predicts=False)
    return runs.trials()


def _in_a_line(error: Exception) -> str:
    if not isinstance(error, MeshwrightError):
        return one_line(error)
    return clean(error.message).strip().partition("\n")[0].rstrip(".") or type(error).__name__


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One run to be made."""

    name: str
    config: TrainConfig
    plan: Plan
    threads: int
    """Threads that one device computes with [count]."""
    is_baseline: bool = False

    @property
    def rank_threads(self) -> int:
        """Threads that a process starts with; data_parallel gives each of its own threads a share [count]."""
        return self.threads * self.plan.num_devices if self.plan.mode == "data_parallel" else self.threads


MANY_TICKS = 20
"""Ticks of processor time that a run must take before its share of the machine is told from the rest's [count]."""


class Runs:
    """The runs of one comparison."""

    def __init__(
        self,
        config: TrainConfig,
        plans: Sequence[str],
        steps: int | None,
        view: ProgressView | None,
        *,
        predicts: bool = True,
    ) -> None:
        if not plans:
            raise ConfigError("there is no plan to compare", fix='--plans "single; distributed"')
        if steps is not None and steps < 1:
            raise ConfigError(f"steps={steps} (rule: at least 1)")
        place = read_place(os.environ)
        if place.world_size > 1:
            raise ConfigError(
                f"compare starts the ranks of each plan itself, and this process is rank {place.rank} of a job "
                f"({place.source})",
                fix="run it outside of torchrun and srun",
            )
        self._config = config
        self._view = view
        # A bar on a terminal; elsewhere the line that names each run is enough.
        self._on_event = (lambda _rank, event: view.show(event)) if view is not None and sys.stderr.isatty() else None
        total = config.train.steps
        self._steps = steps or (total if total <= MOST_STEPS else DEFAULT_STEPS)
        self._notes: list[str] = []
        self._errors: list[Exception] = []
        self._predicts = predicts
        self._predictor = Predictor(config, tell=view.note if view is not None else lambda _text: None)
        resolved = [(text, self._resolve(text)) for text in plans]
        for _, (_, plan) in resolved:
            check_devices(plan.num_devices, str(plan))
        largest = max(plan.num_devices for _, (_, plan) in resolved)
        self._cores = min(usable_cores(), largest * max(1, usable_cores() // largest))
        self._jobs = [self._job(name, *made) for name, made in resolved]
        self._single = self._resolve("single")

    def trials(self) -> list[Trial]:
        """Make the runs that were asked for, and no other."""
        found = [self._run(job) for job in self._jobs]
        if all(trial.error is not None for trial in found):
            raise self._errors[0]
        return found

    def compare(self) -> tuple[Comparison, list[Exception]]:
        """Make the runs; also return the errors of the plans that failed."""
        baseline = str(self._single[1])
        trials = [self._run(job) for job in self._jobs]
        for threads in self._missing_baselines(trials, baseline):
            name = f"single, {threads} thread{'' if threads == 1 else 's'}"
            trials.append(self._run(self._job(name, *self._single, threads=threads, is_baseline=True)))
        if len({trial.device for trial in trials if trial.device}) > 1:
            self._notes.append(
                "the plans ran on different kinds of device; each is compared with single on its own kind"
            )
        self._notes += pace_notes(trials)
        comparison = make_comparison(
            trials,
            baseline=baseline,
            cores=self._cores,
            machine_cores=usable_cores(),
            name=self._config.run_name,
            num_warm_up=WARM_UP_STEPS,
            global_batch_size=self._config.train.global_batch_size,
            notes=tuple(dict.fromkeys(self._notes)),
            config=json.loads(self._config.model_dump_json(exclude={"plan"})),
            environment={**environment(), "processor": processor_name(), "load_average": _load_average()},
        )
        return comparison, self._errors

    def _resolve(self, text: str) -> tuple[TrainConfig, Plan]:
        """Return the configuration under a plan, checked as `load_config` does."""
        config = self._config
        sections = config.model_dump()
        sections["train"]["plan"] = text
        try:
            found = resolve_plan(sections, plan_from_command_line=True, devices_from_command_line=False)
            aside = require_same_training(text, found.changes, sections)
            if self._view is not None:
                show_rows(found.plan_rows, sys.stderr)
            self._notes += [aside] if aside is not None and aside not in self._notes else []
            self._notes += [note for note in found.notes if note not in self._notes]
            train = config.train.model_copy(update={"plan": text})
            made = check_config(config.model_copy(update={"plan": found.plan, "train": train}))
        except ConfigError as error:
            raise ConfigError(f"the plan '{text}': {error.message}", fix=error.fix) from error
        if made.plan_is_auto and not is_switched_off():
            made, lines = choose(made, self._predictor)
            self._notes += [line for line in lines if line not in self._notes]
        return made, made.plan

    def _foresee(self, job: _Job) -> Foreseen:
        """Return what a job's steps should cost; why that is not known is a note."""
        if not self._predicts:
            return Foreseen(None)
        foreseen = self._predictor.predict(job.plan, job.threads)
        if foreseen.why_not:
            self._notes.append(f"nothing is predicted for '{job.plan}': {foreseen.why_not}")
        return foreseen

    def _job(
        self, name: str, config: TrainConfig, plan: Plan, threads: int | None = None, *, is_baseline: bool = False
    ) -> _Job:
        if threads is None:
            # model_parallel computes on one device at a time, each with all the cores there are.
            shares = 1 if plan.mode == "model_parallel" else plan.num_devices
            threads = max(1, self._cores // shares)
        return _Job(name=name, config=config, plan=plan, threads=threads, is_baseline=is_baseline)

    def _missing_baselines(self, trials: Sequence[Trial], baseline: str) -> list[int]:
        """Return the numbers of threads for which a run of single is missing: all the cores, and one device's share."""
        there = {trial.threads for trial in trials if trial.plan == baseline}
        on_cpu = any(trial.is_on_cpu for trial in trials)
        wanted = {self._cores} | {trial.threads for trial in trials if trial.is_on_cpu}
        if not any(trial.error is None for trial in trials):
            return []
        if not on_cpu:
            return [] if there else [self._cores]
        return sorted(wanted - there, reverse=True)

    def _run(self, job: _Job) -> Trial:
        plan, foreseen = job.plan, self._foresee(job)
        known: dict[str, Any] = {
            "name": job.name,
            "plan": str(plan),
            "mode": plan.mode,
            "num_devices": plan.num_devices,
            "num_ranks": plan.num_ranks,
            "threads": job.threads,
            "is_baseline": job.is_baseline,
            "prediction": foreseen.prediction,
            "measured_turn_s": foreseen.turn_s,
        }
        if self._view is not None:
            self._view.note(f"{job.name}: '{plan}', {WARM_UP_STEPS} + {self._steps} steps")
        try:
            ranks = launch(
                run_on_rank,
                plan.num_ranks,
                job.config.model_dump_json(),
                WARM_UP_STEPS,
                self._steps,
                threads_per_rank=job.rank_threads,
                on_event=self._on_event,
            )
        except (StoppedOnRequest, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - a plan that fails is a result; the others still run
            error.add_note(f"under the plan '{plan}'")
            if not job.is_baseline:
                self._errors.append(error)
            return Trial(**known, error=_in_a_line(error))
        finally:
            if self._view is not None:
                self._view.close()
        return Trial(**known, **_merge(ranks))


def run_on_rank(config_json: str, num_warm_up: int, num_steps: int) -> RankSamples:
    """Run a trial on this rank; see `trial.run_trial`."""
    from meshwright.compare.trial import run_trial

    return run_trial(TrainConfig.model_validate_json(config_json), num_warm_up, num_steps)


def _merge(ranks: Sequence[RankSamples]) -> dict[str, Any]:
    """Return a trial's samples: the slowest rank's time, the values on which all ranks agree, and bytes and waiting by rank."""
    first, skip = ranks[0], WARM_UP_STEPS
    formulas = [rank.formula_bytes for rank in ranks if rank.formula_bytes is not None]
    return {
        "device": first.device,
        "step_seconds": [max(seconds) for seconds in zip(*(rank.seconds[skip:] for rank in ranks), strict=True)],
        "num_samples": first.num_samples[skip:],
        "num_tokens": first.num_tokens[skip:],
        "losses": first.losses,
        "sent_bytes": list(zip(*(rank.sent_bytes[skip:] for rank in ranks), strict=True)),
        "wait_seconds": list(zip(*(rank.wait_seconds[skip:] for rank in ranks), strict=True))
        if first.sees_waiting
        else [],
        "formula_bytes": statistics.fmean(formulas) if len(formulas) == len(ranks) else None,
        "other_cores": _other_cores(ranks),
        "turn_s": statistics.fmean(rank.turn_s for rank in ranks),
        "peak_memory_bytes": [peak for rank in ranks for peak in rank.peak_memory_bytes],
    }


def _other_cores(ranks: Sequence[RankSamples]) -> float | None:
    """Return the number of cores that other work kept busy during the ranks' measured steps [count].

    None where the steps were too short: the kernel counts processor time in ticks, usually of 10 ms.
    """
    if ranks[0].elapsed_s < MANY_TICKS / os.sysconf("SC_CLK_TCK"):
        return None
    others_s = ranks[0].machine_busy_s - sum(rank.own_busy_s for rank in ranks)
    return max(0.0, others_s / ranks[0].elapsed_s)


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
