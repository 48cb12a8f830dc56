"""`meshwright report`: runs and comparisons as one HTML file. Free of torch.

Runs side by side get `compare`'s conclusion where they are the same training under several plans; where they are not,
the report says which settings differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from meshwright.compare.comparison import Comparison, make_comparison
from meshwright.compare.rows import Trial
from meshwright.errors import ConfigError
from meshwright.report.figures import WARM_UP_STEPS
from meshwright.report.page import REPORT_FILE, ComparedPlans, render, write_page
from meshwright.report.run_files import RunFiles, number_of, read_json_file, read_run
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []

MOST_RUNS: Final = 32
"""Runs in one report [count]."""

_MAY_DIFFER: Final = frozenset(
    {
        "base_directory", "checkpoint", "notes", "plan_rows", "train.devices", "train.directory", "train.eval_batches",
        "train.eval_every", "train.max_restarts", "train.max_seconds", "train.micro_batches", "train.name", "train.plan",
        "train.print_every", "train.sentinel_every", "train.steps", "train.timeout_s", "data.num_workers", "data.prefetch",
    }
)  # fmt: skip
"""Settings that may differ between runs of the same training."""


_HEAD: Final = (
    "run", "plan", "steps", "step, median", "tokens/s", "last loss", "last held-out", "peak memory", "predicted step", "ratio",
)  # fmt: skip
_NOT_TOGETHER: Final = (
    "These runs were made at different times; `meshwright compare` runs plans one right after the other."
)


def run_report(paths: Sequence[Path], output: Path | None, *, with_every_step: bool = False) -> Path:
    """Write a report, and return its file.

    Args:
        paths: Folders of runs, or one file that `meshwright compare --json` wrote.
        output: The file; None: report.html in the folder of the only run, or beside the comparison's file.
        with_every_step: Whether the exact numbers of all steps go into it.

    Raises:
        ConfigError: A path is not a run's folder, there are too many, or the file is not a report and would be replaced.
        StorageError: A file cannot be read or written.
    """
    if output is None and len(paths) > 1:
        raise ConfigError(f"a report of {len(paths)} runs has no folder of its own", fix="-o report.html")
    if len(paths) > MOST_RUNS:
        raise ConfigError(f"{len(paths)} runs (rule: at most {MOST_RUNS} in one report)", fix="name fewer of them")
    if output is not None and str(output) == "-":
        raise ConfigError("-o -: a report is an HTML file, and is not printed", fix="-o report.html")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.absolute().parent}")
    first = paths[0]
    if len(paths) == 1 and first.suffix == ".json" and not first.is_dir():
        target = output or first.with_suffix(".html")
        write_page(render([], compared=compared_plans(_read_comparison(first))), target)
        return target
    runs = [read_run(path) for path in paths]
    html = render(runs, compared=side_by_side(runs) if len(runs) > 1 else None, with_every_step=with_every_step)
    target = output or first / REPORT_FILE
    write_page(html, target)
    return target


def compared_plans(comparison: Comparison) -> ComparedPlans:
    """Return a comparison as the report shows it."""
    return ComparedPlans(
        title=comparison.title,
        tables=comparison.tables(),
        legend=comparison.legend(),
        conclusion=comparison.conclusion,
    )


def side_by_side(runs: Sequence[RunFiles]) -> ComparedPlans:
    """Return some runs as a table, with the conclusion of a comparison where they are the same training."""
    table = [list(_HEAD), *(_row(index, run) for index, run in enumerate(runs, start=1))]
    title = f"{len(runs)} runs"
    different = _differences(runs)
    if different:
        return ComparedPlans(title=title, tables=[table], conclusion=f"No conclusion: {different}")
    comparison = _compare(runs)
    return ComparedPlans(
        title=title,
        tables=[table, *comparison.tables()[:1]],
        legend=comparison.legend()[:3],
        conclusion=f"{comparison.conclusion} {_NOT_TOGETHER}",
    )


def _read_comparison(path: Path) -> Comparison:
    text = read_json_file(path)
    if text is None:
        raise ConfigError(
            f"{path} does not exist", fix="name a run's folder, or what `meshwright compare --json` wrote"
        )
    try:
        return Comparison.from_json(text)
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply") from error


def _row(index: int, run: RunFiles) -> list[str]:
    record = run.record
    measurement = record.measurement if record is not None else None
    prediction = record.prediction if record is not None else None
    step_s = measurement.step_s if measurement is not None else None
    rate = measurement.tokens_per_s if measurement is not None else None
    peak = measurement.peak_memory_bytes if measurement is not None else None
    held = run.evaluations.columns["loss"]
    ratio = record.step_time_ratio if record is not None else None
    return [
        f"{index}: {run.name}",
        str(run.plan) if run.plan is not None else "-",
        str(run.steps.steps[-1]) if len(run.steps) else "0",
        format_seconds(step_s) if step_s is not None else "-",
        f"{rate:,.0f}" if rate else "-",
        f"{measurement.loss:.6g}" if measurement is not None and measurement.loss is not None else "-",
        f"{held[-1]:.6g}" if held and not math.isnan(held[-1]) else "-",
        format_bytes(peak) if peak is not None else "-",
        format_seconds(prediction.step_s) if prediction is not None else "-",
        f"{ratio:.2f}" if ratio is not None else "-",
    ]


def _differences(runs: Sequence[RunFiles]) -> str:
    """Return why these runs cannot be compared; "" where they can."""
    for index, run in enumerate(runs, start=1):
        if run.record is None or run.record.measurement is None or not run.record.measurement.step_seconds:
            return f"run {index} has no measurement in its record."
    configs = [_flat(run.record.to_dict()["config"]) for run in runs if run.record is not None]
    keys = sorted(key for key in {key for config in configs for key in config} if not _may_differ(key))
    different = [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]
    if different:
        return f"these are different trainings, they differ in {', '.join(different[:10])}."
    machines = {
        json.dumps(run.record.to_dict()["environment"], sort_keys=True) for run in runs if run.record is not None
    }
    if len(machines) > 1:
        return "the runs were on different machines, or with other versions of Python, torch or Meshwright."
    return ""


def _may_differ(key: str) -> bool:
    return key in _MAY_DIFFER or key.partition(".")[0] in _MAY_DIFFER


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's entries by "section.key"."""
    flat: dict[str, Any] = {}
    for section, entries in config.items():
        if isinstance(entries, Mapping):
            flat |= {f"{section}.{key}": value for key, value in cast("Mapping[str, Any]", entries).items()}
        else:
            flat[section] = entries
    return flat


def _compare(runs: Sequence[RunFiles]) -> Comparison:
    # A damaged line, or a run that began elsewhere, must not set one step's loss beside another's.
    common = frozenset[int].intersection(*(frozenset(run.steps.steps) for run in runs))
    trials = [_trial(index, run, common) for index, run in enumerate(runs, start=1)]
    cores = max((int(_number(run, "cores") or 1) for run in runs), default=1)
    batch = int(number_or_none(runs[0].start.get("global_batch_size")) or 1)
    return make_comparison(
        trials, baseline="single", cores=cores, name="runs", num_warm_up=WARM_UP_STEPS, global_batch_size=batch
    )


def _trial(index: int, run: RunFiles, common: frozenset[int]) -> Trial:
    """Return a run's record as a comparison takes it: its measured steps, and the losses of the steps that all runs have."""
    record = run.record
    if record is None or record.measurement is None:
        raise ConfigError(f"{run.path} has no measurement")
    measured, plan = record.measurement, record.plan
    steps = len(measured.step_seconds)
    sent = sum(measured.sent_bytes.values()) / measured.num_sent_steps if measured.num_sent_steps else 0.0
    losses = [loss for step, loss in zip(run.steps.steps, run.steps.columns["loss"], strict=True) if step in common]
    return Trial(
        name=f"{index}: {run.name}"[:200],
        plan=str(plan),
        mode=plan.mode,
        num_devices=plan.num_devices,
        num_ranks=plan.num_ranks,
        threads=max(1, int(number_or_none(run.start.get("threads")) or 1)),
        device=str(run.start.get("device", "cpu"))[:100],
        step_seconds=tuple(max(seconds, 1e-12) for seconds in measured.step_seconds),
        num_samples=(round(measured.num_samples / steps),) * steps,
        num_tokens=(round(measured.num_tokens / steps),) * steps,
        losses=tuple(None if math.isnan(loss) else loss for loss in losses),
        sent_bytes=((sent,),) * steps,
        peak_memory_bytes=measured.rank_peak_memory_bytes,
        prediction=record.prediction,
    )


def _number(run: RunFiles, key: str) -> float | None:
    return number_or_none(run.record.environment.get(key)) if run.record is not None else None


def number_or_none(value: object) -> float | None:
    """Return a number; None for what is not one."""
    number = number_of(value)
    return None if math.isnan(number) else number
