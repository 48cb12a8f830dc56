"""Comparison of plans as a value: raw samples of each run, a row of numbers for each, tables, and a conclusion.

    Trial  ->  ComparisonRow  ->  Comparison
    samples    medians, ratios    rows, conclusion, JSON

Runs are made by `compare/run_plans.py`; nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from meshwright.compare.conclusion import draw_conclusion
from meshwright.compare.formulas import (
    amdahl_parallel_fraction,
    relative_difference,
    speedup,
    spread,
)
from meshwright.compare.rows import ComparisonRow, Trial
from meshwright.texts import html_block, html_table, html_text
from meshwright.units import format_bytes, format_seconds
from meshwright.values import FrozenMap, Value

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Value):
    """Several plans on the same model, data and seed. ``str()`` is the table.

    Args:
        name: The configuration's name.
        cores: The cores that every plan of the comparison shares, and that ``single`` has for itself [count].
        rows: The plans in the order given, then the runs that were added to compare with.
        conclusion: The conclusion, in words.
        num_warm_up: Steps before the measured ones [count].
        global_batch_size: Samples in a step [count].
        notes: Remarks on the method, for the user.
        config: The configuration, as plain JSON data.
        environment: Versions, host and processor, as plain JSON data.
    """

    FORMAT: ClassVar[str] = "comparison"

    name: str
    cores: int
    rows: tuple[ComparisonRow, ...]
    conclusion: str = ""
    num_warm_up: int = 0
    global_batch_size: int = 1
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = dataclasses.field(default_factory=FrozenMap[Any])
    environment: Mapping[str, Any] = dataclasses.field(default_factory=FrozenMap[Any])

    def __post_init__(self) -> None:
        self._check_types()

    def __str__(self) -> str:
        blocks = ["\n".join(_align(block)) for block in self.tables()]
        return "\n\n".join([self.title, *blocks, "\n".join(self.legend()), self.conclusion])

    def _repr_html_(self) -> str:
        """Return the comparison as a notebook shows it."""
        tables = [html_table(head, rows) for head, *rows in self.tables()]
        return html_block(self.title, *tables, html_text(self.conclusion), html_text("\n".join(self.legend())))

    @property
    def title(self) -> str:
        """One line that says what was compared."""
        steps = max((len(row.trial.step_seconds) for row in self.rows), default=0)
        return (
            f"{self.name}: {steps} steps of {self.global_batch_size} samples after {self.num_warm_up} of warm-up, "
            f"{self.cores} {'core' if self.cores == 1 else 'cores'}"
        )

    def tables(self) -> list[list[list[str]]]:
        """Return the tables, time, cost and prediction where there is one, as rows of cells; the first of each is its head."""
        times = [["plan", "step", "quartiles", "samples/s", "tokens/s", "x single", "S", "S/n", "p"]]
        costs = [
            [
                "plan",
                "runs as",
                "peak memory",
                "sent/step",
                "formula",
                "ratio",
                "exposed",
                "of step",
                "loss diff.",
                "others",
            ]
        ]
        for row in self.rows:
            times.append([_name(row), *_time_cells(row)])
            costs.append([_name(row), _runs_as(row.trial), *_cost_cells(row)])
        if all(row.trial.prediction is None for row in self.rows):
            return [times, costs]
        foreseen = [["plan", "step, predicted", "ratio", "peak, predicted", "ratio", "sent, predicted", "ratio"]]
        foreseen += [[_name(row), *_prediction_cells(row)] for row in self.rows]
        return [times, costs, foreseen]

    def legend(self) -> list[str]:
        """Return the meaning of the columns, and the notes."""
        return [*_LEGEND, *(f"note: {note}" for note in self.notes)]


_SAME_PACE = 0.15
"""By how much a machine's pace may differ before it is said [ratio]."""

_LEGEND = (
    "step: median of the slowest rank's wall time, reading of data left out; quartiles: the middle half of the steps.",
    "x single: against single on all cores of this comparison. S: against single on what one device of the plan has",
    "  (its threads, or one GPU), S/n: efficiency over n devices, p: Amdahl's parallel fraction that S amounts to, as",
    "  measured: above 1 or below 0 says that the law's premises do not hold here.",
    "peak memory: of the rank (or GPU) that held most; resident set on the CPU, Python and torch in it; allocator on GPUs.",
    "sent: by the ledger, mean of the ranks; formula: 2(n-1)/n of the gradients, as they are sent, for distributed; exchanges of",
    "  each region for tp; for pp what stages take of each other, and its gradients; C = sum(s_i x b) x 2 over the cuts for",
    "  model_parallel (between CPU devices counted, not copied). What ranks agree on comes on top, some 100 bytes a step.",
    "exposed: time in a step for which ranks stood still for exchanges, waiting for a slower rank or an earlier stage included;",
    "  of step: its share.",
    "predicted: from the model's description and this machine's measurements, before the run; ratio: measured over predicted.",
    "loss diff.: largest relative difference to single's loss at the same step. others: cores that other work on this",
    "  machine kept busy meanwhile; what is not near 0 makes the times of that row too long.",
)


def make_comparison(
    trials: Sequence[Trial], *, baseline: str, cores: int, machine_cores: int | None = None, **fields: Any
) -> Comparison:
    """Derive the rows and the conclusion from some runs.

    Args:
        trials: The runs, those that were added to compare with among them.
        baseline: The canonical line of the plan that is compared with, "single" with the configuration's precision.
        cores: The cores of the comparison [count].
        machine_cores: The cores that this process may use, by which other work is judged; None: `cores` [count].
        **fields: The other fields of `Comparison`.
    """
    rows = tuple(_make_row(trial, trials, baseline, cores) for trial in trials)
    conclusion = draw_conclusion(rows, baseline, cores, machine_cores)
    return Comparison(rows=rows, cores=cores, conclusion=conclusion, **fields)


def pace_notes(trials: Sequence[Trial]) -> list[str]:
    """Return what a reader is to know of a machine that was slower or faster than when it was measured."""
    paces = [trial.pace for trial in trials if trial.pace is not None and trial.prediction is not None]
    if not paces or all(abs(pace - 1) <= _SAME_PACE for pace in paces):
        return []
    low, high = min(paces), max(paces)
    span = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    return [
        f"this machine computed at {span} times the pace of when it was measured, by a fixed piece of work beside each run: "
        "predicted steps are those of that day"
    ]


def _make_row(trial: Trial, trials: Sequence[Trial], baseline: str, cores: int) -> ComparisonRow:
    if trial.error is not None:
        return ComparisonRow(trial=trial)
    steps = spread(trial.step_seconds)
    whole = _find_baseline(trial, trials, baseline, cores)
    one = _find_baseline(trial, trials, baseline, trial.threads)
    over_one = speedup(_median(one), steps.median) if one is not None else None
    sent = statistics.fmean(statistics.fmean(ranks) for ranks in trial.sent_bytes)
    exposed = [statistics.fmean(ranks) for ranks in trial.wait_seconds]
    differences, num_incomparable = _loss_differences(trial, whole or one)
    has_tokens = trial.num_tokens != trial.num_samples
    return ComparisonRow(
        trial=trial,
        step_s=steps.median,
        low_s=steps.low,
        high_s=steps.high,
        samples_per_s=statistics.fmean(trial.num_samples) / steps.median,
        tokens_per_s=statistics.fmean(trial.num_tokens) / steps.median if has_tokens else None,
        speedup_same_cores=speedup(_median(whole), steps.median) if whole is not None else None,
        speedup=over_one,
        efficiency=over_one / trial.num_devices if over_one is not None else None,
        parallel_fraction=amdahl_parallel_fraction(over_one, trial.num_devices) if over_one is not None else None,
        peak_memory_bytes=max(trial.peak_memory_bytes, default=None),
        sent_bytes=sent,
        sent_ratio=sent / trial.formula_bytes if trial.formula_bytes else None,
        **_prediction_ratios(trial, steps.median, sent),
        exposed_s=statistics.median(exposed) if exposed else None,
        exposed_fraction=_exposed_fraction(trial, exposed) if exposed else None,
        loss_difference=max(differences, default=None),
        num_incomparable=num_incomparable,
    )


def _find_baseline(trial: Trial, trials: Sequence[Trial], baseline: str, threads: int) -> Trial | None:
    """Return the run of the baseline on the same kind of device, with this many threads where that is the CPU."""
    for other in trials:
        fits = other.plan == baseline and other.device == trial.device and other.error is None
        if fits and (other.threads == threads or not trial.is_on_cpu):
            return other
    return None


def _median(trial: Trial) -> float:
    return statistics.median(trial.step_seconds)


def _prediction_ratios(trial: Trial, step_s: float, sent: float) -> dict[str, float | None]:
    prediction = trial.prediction
    if prediction is None:
        return {}
    peak, sent_predicted = max(trial.peak_memory_bytes, default=None), sum(prediction.sent_bytes.values())
    return {
        "step_prediction_ratio": step_s / prediction.step_s if prediction.step_s else None,
        "memory_prediction_ratio": peak / prediction.peak_bytes if peak and prediction.peak_bytes else None,
        "sent_prediction_ratio": sent / sent_predicted if sent_predicted else None,
    }


def _exposed_fraction(trial: Trial, exposed: Sequence[float]) -> float:
    return statistics.median(wait / seconds for wait, seconds in zip(exposed, trial.step_seconds, strict=True))


def _loss_differences(trial: Trial, reference: Trial | None) -> tuple[list[float], int]:
    """Return the relative differences of the steps' losses, and how many steps have none though the losses differ."""
    if reference is None:
        return [], 0
    found: list[float] = []
    num_incomparable = 0
    for mine, other in zip(trial.losses, reference.losses, strict=False):
        if mine is None or other is None:
            num_incomparable += mine is not other
        elif (difference := relative_difference(mine, other)) < math.inf:
            found.append(difference)
        else:
            num_incomparable += 1
    return found, num_incomparable


# -- cells ------------------------------------------------------------------------------------------------------------


def _name(row: ComparisonRow) -> str:
    return f"({row.trial.name})" if row.trial.is_baseline else row.trial.name


def _runs_as(trial: Trial) -> str:
    if trial.device and not trial.is_on_cpu:
        return f"{trial.num_devices} GPU{'' if trial.num_devices == 1 else 's'}"
    threads = f"{trial.threads} thread{'' if trial.threads == 1 else 's'}"
    if trial.mode == "data_parallel":
        return f"1 process, {trial.num_devices} x {threads}"
    if trial.mode == "model_parallel":
        return f"1 process, {trial.num_devices} stages, {threads}"
    return f"{trial.num_ranks} process{'' if trial.num_ranks == 1 else 'es'} x {threads}"


def _time_cells(row: ComparisonRow) -> list[str]:
    if row.step_s is None or row.low_s is None or row.high_s is None:
        return ["failed", *["-"] * 7]
    return [
        format_seconds(row.step_s),
        f"{format_seconds(row.low_s)} .. {format_seconds(row.high_s)}",
        _number(row.samples_per_s, ",.0f" if (row.samples_per_s or 0) >= 100 else ".1f"),
        _number(row.tokens_per_s, ",.0f"),
        _number(row.speedup_same_cores, ".2f"),
        _number(row.speedup, ".2f"),
        _number(row.efficiency, ".0%"),
        _number(row.parallel_fraction, ".2f"),
    ]


def _cost_cells(row: ComparisonRow) -> list[str]:
    formula = row.trial.formula_bytes
    return [
        _bytes(row.peak_memory_bytes),
        _bytes(row.sent_bytes),
        _bytes(formula if row.step_s is not None else None),
        _number(row.sent_ratio, ".4f"),
        "-" if row.exposed_s is None else format_seconds(row.exposed_s),
        _number(row.exposed_fraction, ".1%"),
        _number(row.loss_difference, ".1e"),
        _number(row.trial.other_cores, ".1f"),
    ]


def _prediction_cells(row: ComparisonRow) -> list[str]:
    prediction = row.trial.prediction
    if prediction is None:
        return ["-"] * 6
    return [
        format_seconds(prediction.step_s),
        _number(row.step_prediction_ratio, ".2f"),
        format_bytes(prediction.peak_bytes),
        _number(row.memory_prediction_ratio, ".2f"),
        format_bytes(sum(prediction.sent_bytes.values())),
        _number(row.sent_prediction_ratio, ".4f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


def _align(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns: words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        parts = [
            cell.ljust(width) if head in ("plan", "runs as") else cell.rjust(width)
            for cell, width, head in zip(row, widths, cells[0], strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return [lines[0], rule, *lines[1:]]
