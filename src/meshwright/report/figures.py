"""Figures of a run as plain data: down-sampled for drawing by the lowest and highest of each bucket, with exact statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from meshwright.report.run_files import RunFiles, Series

__all__: list[str] = []

MOST_POINTS: Final = 2000
"""Points of a line that are drawn without down-sampling [count]."""
SPREAD_BLOCKS: Final = 60
"""Blocks of steps over which the spread of step times is drawn [count]."""
WARM_UP_STEPS: Final = 3
"""First steps that measurements leave out, as in record.json [count]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure with what a reader without eyes for it needs.

    Args:
        key: Its id in the page.
        title: Its heading.
        unit: Unit of the vertical axis, as in "s" or "bytes".
        data: x and lines, for the page's script: x, lines of label, kind and y.
        rows: Statistics, exact: label, first, lowest, quartile, median, quartile, highest, last.
        steps_per_point: Steps that a bucket of the drawing stands for; 1: all are drawn [count].
        starts_log: Whether the vertical axis begins logarithmic.
    """

    key: str
    title: str
    unit: str
    data: dict[str, Any]
    rows: list[tuple[str, list[float | None]]]
    steps_per_point: int = 1
    starts_log: bool = False


def min_max_buckets(
    steps: np.ndarray, columns: Sequence[np.ndarray], most: int = MOST_POINTS
) -> tuple[np.ndarray, list[np.ndarray], int]:
    """Return a drawing's points: all of them, or the lowest and the highest of each bucket in their order.

    Args:
        steps: Steps, ascending (n).
        columns: Values, NaN where there is none (n each).
        most: Points at most [count].

    Returns:
        Steps, values, and how many steps a bucket has.

    >>> x, (y,), size = min_max_buckets(np.arange(8), [np.array([0.0, 9, 1, 1, 5, 5, -3, 5])], most=4)
    >>> x.tolist(), y.tolist(), size
    ([0, 3, 4, 7], [0.0, 9.0, 5.0, -3.0], 4)
    """
    n = len(steps)
    if n <= most:
        return steps, list(columns), 1
    size = math.ceil(n / (most // 2))
    starts = np.arange(0, n, size)
    ends = np.minimum(starts + size, n) - 1
    x = np.stack([steps[starts], steps[ends]], axis=1).ravel()
    is_single = bool(starts[-1] == ends[-1])
    padded = np.arange(len(starts) * size).reshape(len(starts), size)
    drawn: list[np.ndarray] = []
    for column in columns:
        filled = np.full(len(starts) * size, np.nan)
        filled[:n] = column
        block = filled[padded]
        low = np.where(np.isnan(block), np.inf, block)
        high = np.where(np.isnan(block), -np.inf, block)
        where_low, where_high = low.argmin(axis=1), high.argmax(axis=1)
        rows = np.arange(len(starts))
        first = np.minimum(where_low, where_high)
        second = np.maximum(where_low, where_high)
        drawn.append(np.stack([block[rows, first], block[rows, second]], axis=1).ravel())
    if is_single:
        x, drawn = x[:-1], [y[:-1] for y in drawn]
    return x, drawn, size


def statistics_row(values: np.ndarray) -> list[float | None]:
    """Return first, lowest, quartile, median, quartile, highest and last; None for a first or last one that is not finite."""
    known = values[~np.isnan(values)]
    if not known.size:
        return [None] * 7
    low, median, high = np.percentile(known, [25, 50, 75])
    found = (values[0], known.min(), low, median, high, known.max(), values[-1])
    return [None if np.isnan(one) else float(one) for one in found]


def run_figures(run: RunFiles, key: str) -> list[Figure]:
    """Return the figures of a run; those without a number are left out.

    Args:
        run: The run.
        key: Beginning of the figures' ids.
    """
    figures = [
        _loss_figure(run, key),
        _line(run, f"{key}-tokens", "Tokens a second", unit="1/s", column="tokens_per_s", label="tokens/s")
        if _counts_tokens(run.steps)
        else _line(run, f"{key}-samples", "Samples a second", unit="1/s", column="samples_per_s", label="samples/s"),
        _time_figure(run, key),
        _line(run, f"{key}-norm", "Gradient norm", unit="", column="grad_norm", label="gradient norm", starts_log=True),
        _line(
            run, f"{key}-memory", "Peak memory so far, rank 0", unit="bytes", column="peak_memory_bytes", label="rank 0"
        ),
        _line(run, f"{key}-rate", "Learning rate", unit="", column="lr", label="learning rate"),
    ]
    return [figure for figure in figures if any(row[3] is not None for _, row in figure.rows)]


def overlay(runs: Sequence[tuple[str, RunFiles]], key: str, title: str, column: str, unit: str = "") -> Figure:
    """Return one line for each run in one figure; steps that a run does not have are gaps."""
    lines: list[dict[str, Any]] = []
    rows: list[tuple[str, list[float | None]]] = []
    drawn: list[tuple[np.ndarray, np.ndarray]] = []
    most_size = 1
    for label, run in runs:
        steps, values = _arrays(run.steps, column)
        x, (y,), size = min_max_buckets(steps, [values])
        most_size = max(most_size, size)
        drawn.append((x, y))
        rows.append((label, statistics_row(values)))
    union = np.unique(np.concatenate([x for x, _ in drawn])) if drawn else np.array([])
    for (label, _), (x, y) in zip(runs, drawn, strict=True):
        aligned = np.full(len(union), np.nan)
        aligned[np.searchsorted(union, x)] = y
        lines.append({"label": label, "kind": "line", "y": _json(aligned), "joins": True})
    return Figure(
        key=key,
        title=title,
        unit=unit,
        data={"x": union.tolist(), "lines": lines},
        rows=rows,
        steps_per_point=most_size,
    )


def every_step(run: RunFiles) -> dict[str, Any]:
    """Return the exact numbers of all steps, as columns."""
    columns = {name: _json(np.array(column), exact=True) for name, column in run.steps.columns.items()}
    return {"step": run.steps.steps.tolist(), **columns}


def median_load_s(run: RunFiles) -> float | None:
    """Return the median time of a step for which it waited for data; None where that was not told [s]."""
    _, whole = _arrays(run.steps, "seconds")
    _, inside = _arrays(run.steps, "step_seconds")
    loads = (whole - inside)[WARM_UP_STEPS:] if len(whole) > WARM_UP_STEPS else whole - inside
    loads = loads[~np.isnan(loads)]
    return max(0.0, float(np.median(loads))) if loads.size else None


def _loss_figure(run: RunFiles, key: str) -> Figure:
    steps, loss = _arrays(run.steps, "loss")
    x, (y,), size = min_max_buckets(steps, [loss])
    held_steps, held = _arrays(run.evaluations, "loss")
    union = np.union1d(x, held_steps)
    lines: list[dict[str, Any]] = []
    for label, kind, at, values in (("loss", "line", x, y), ("held-out loss", "points", held_steps, held)):
        aligned = np.full(len(union), np.nan)
        aligned[np.searchsorted(union, at)] = values
        lines.append({"label": label, "kind": kind, "y": _json(aligned), "joins": True})
    rows = [("loss", statistics_row(loss)), ("held-out loss", statistics_row(held))]
    return Figure(
        key=f"{key}-loss",
        title="Loss",
        unit="",
        data={"x": union.tolist(), "lines": lines},
        rows=rows,
        steps_per_point=size,
    )


def _time_figure(run: RunFiles, key: str) -> Figure:
    steps, seconds = _arrays(run.steps, "seconds")
    low, high = _spread(seconds)
    x, (y, low_y, high_y), size = min_max_buckets(steps, [seconds, low, high])
    lines = [
        {"label": "step time", "kind": "line", "y": _json(y)},
        {"label": "upper quartile", "kind": "band", "y": _json(high_y)},
        {"label": "lower quartile", "kind": "band", "y": _json(low_y)},
    ]
    rows = [("all steps", statistics_row(seconds))]
    if len(seconds) > WARM_UP_STEPS:
        rows.append((f"without the first {WARM_UP_STEPS}", statistics_row(seconds[WARM_UP_STEPS:])))
    return Figure(
        key=f"{key}-time", title="Step time", unit="s", data={"x": x.tolist(), "lines": lines}, rows=rows,
        steps_per_point=size,
    )  # fmt: skip


def _spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the quartiles of the block of neighbouring steps that each step is in."""
    low, high = np.full(len(values), np.nan), np.full(len(values), np.nan)
    size = max(8, math.ceil(len(values) / SPREAD_BLOCKS))
    for start in range(0, len(values), size):
        block = values[start : start + size]
        known = block[~np.isnan(block)]
        if known.size:
            low[start : start + size], high[start : start + size] = np.percentile(known, [25, 75])
    return low, high


def _line(
    run: RunFiles, key: str, title: str, *, unit: str, column: str, label: str, starts_log: bool = False
) -> Figure:
    steps, values = _arrays(run.steps, column)
    x, (y,), size = min_max_buckets(steps, [values])
    data = {"x": x.tolist(), "lines": [{"label": label, "kind": "line", "y": _json(y)}]}
    rows = [(label, statistics_row(values))]
    positive = bool(len(values)) and not bool((values <= 0).any())
    return Figure(
        key=key, title=title, unit=unit, data=data, rows=rows, steps_per_point=size, starts_log=starts_log and positive
    )


def _arrays(series: Series, column: str) -> tuple[np.ndarray, np.ndarray]:
    return np.array(series.steps, dtype=np.int64), np.array(series.columns[column])


def _counts_tokens(series: Series) -> bool:
    """Tell whether samples consist of several tokens."""
    tokens, samples = np.array(series.columns["num_tokens"]), np.array(series.columns["num_samples"])
    return bool((tokens > samples).any())


def _json(values: np.ndarray, *, exact: bool = False) -> list[float | None]:
    """Return numbers for JSON, None for NaN; drawn ones with seven digits, which no screen tells from more."""
    if exact:
        return [None if math.isnan(value) else value for value in values.tolist()]
    return [None if math.isnan(value) else float(f"{value:.7g}") for value in values.tolist()]
