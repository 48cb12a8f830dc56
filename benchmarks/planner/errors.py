"""Errors of predictions against published rows, by group, beside the floor of a constant share of the peak."""

from __future__ import annotations

import collections
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

Row = dict[str, Any]

Cells = dict[str, Any]
"""Heading -> number, or None where a baseline was not run."""

# Step-time errors of Calculon (commit of 2024-02-22) on the rows of a group, zero-shot: mean absolute, in percent.
# Run on the published rows that are not held back, with its a100_80g.json and each row's network.
CALCULON_MEAN = {
    "korthikanti22": 4.1,
    "megatron-sc21": 11.4,
    "megatron-readme-2020": 14.5,
    "zero-bubble": 15.8,
    "bigscience": 28.9,
    "vTrain-single": 35.8,
}

_MOST = 1e15
"""Above any time or size that a row can mean, and below what a float cannot hold."""


def usable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose step time is known and may be compared, each once; of one id the last."""
    found = {
        (place if row.get("id") is None else str(row["id"])): row
        for place, row in enumerate(rows)
        if isinstance(row, dict)
        and row.get("status") == "ok"
        and _is_for(row, "time")
        and _is_positive(_measured(row, "step_time_s"))
    }
    return list(found.values())


def _is_for(row: Row, use: str) -> bool:
    uses = row.get("usable_for")
    return isinstance(uses, list | tuple) and use in uses


def _measured(row: Row, name: str) -> object:
    part = row.get("measured")
    return part.get(name) if isinstance(part, dict) else None


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST


def read(paths: Sequence[Path]) -> list[Row]:
    """Return the usable rows of JSON files."""
    return usable([row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))])


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[str(row.get("group"))].append(row)
    return dict(groups)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def errors_of(rows: Sequence[Row], seconds: Callable[[Row], float]) -> dict[str, Cells]:
    """Return for each group n, bias, mean, median, 90th percentile and maximum of the absolute errors, in percent."""
    table: dict[str, Cells] = {}
    for group, own in sorted(by_group(rows).items()):
        ratios = [seconds(row) / row["measured"]["step_time_s"] for row in own]
        middle = statistics.median(ratios)
        errors = [abs(ratio - 1) * 100 for ratio in ratios]
        scaled = [abs(ratio / middle - 1) * 100 for ratio in ratios]
        floor = constant_share(own)
        table[group] = {
            "n": len(own),
            "median_ratio": middle,
            "mean": statistics.fmean(errors),
            "median": statistics.median(errors),
            "p90": quantile(errors, 0.9),
            "max": max(errors),
            "median_after_one_scalar": statistics.median(scaled),
            "mean_of_constant_share": statistics.fmean(floor) if floor else None,
            "mean_of_calculon": CALCULON_MEAN.get(group),
        }
    return table


def constant_share(rows: Sequence[Row]) -> list[float]:
    """Return the errors of the constant share of the peak that suits each GPU, precision and recompute of a group best."""
    cells: dict[tuple[object, ...], list[float]] = collections.defaultdict(list)
    for row in rows:
        try:
            work = flops(row) * row["batch"]["global"] * row["model"]["seq"] / row["hardware"]["gpus"]
        except (
            KeyError,
            TypeError,
            ArithmeticError,
            AttributeError,
        ):  # a row that does not say what its work is has no share
            continue
        if not 0 < work < math.inf:
            continue
        cell = str(row["hardware"].get("gpu")), str(row.get("precision")), str(row.get("recompute"))
        cells[cell].append(work / row["measured"]["step_time_s"])
    # A step's time is work over speed: predicted over measured is measured speed over the cell's median one.
    return [abs(speed / statistics.median(speeds) - 1) * 100 for speeds in cells.values() for speed in speeds]


def flops(row: Row) -> float:
    """Return the model's FLOPs for one token, forward and backward."""
    model = row["model"]
    hidden, layers, sequence = model["hidden"], model["layers"], model["seq"]
    width = (3 if model.get("gated_mlp") else 2) * (model.get("ffn_hidden") or 4 * hidden)
    keys = (model.get("kv_heads") or model["heads"]) / model["heads"]
    matrices = layers * hidden * (2 * hidden + 2 * hidden * keys + width) + hidden * (model.get("vocab") or 50257)
    return 6.0 * matrices + 12.0 * layers * hidden * sequence


def memory_errors(answers: Sequence[tuple[Row, Row]]) -> dict[str, dict[str, float]]:
    """Return errors of the peak of memory by group and by how it was read, in percent, from rows and their answers.

    Rows that failed for memory are counted as "failed" and, where that was predicted, as "told"; those that ran in the same way.
    """
    found: dict[str, list[float]] = collections.defaultdict(list)
    counts: dict[str, float] = collections.defaultdict(float)
    for row, answer in answers:
        if answer["fits"] is None:
            continue
        measured = _measured(row, "peak_mem_GB")
        if _is_positive(measured) and _is_for(row, "memory"):
            found[f"{row.get('group')}, {row.get('mem_kind')}"].append(answer["peak_memory_bytes"] / 1e9 / measured - 1)
        if row.get("status") in ("ok", "oom"):
            counts[f"{row['status']}"] += 1
            counts[f"{row['status']}_told"] += answer["fits"] == (row["status"] == "ok")
    table = {
        kind: {
            "n": len(own),
            "bias": statistics.median(own) * 100,
            "mean": statistics.fmean(map(abs, own)) * 100,
            "p90": quantile([abs(one) for one in own], 0.9) * 100,
        }
        for kind, own in sorted(found.items())
    }
    return table | {"fits": dict(counts)}


def show_memory(table: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of `memory_errors` as text."""
    lines = [f"{'memory':64}{'n':>6}{'bias':>8}{'mean':>8}{'p90':>8}"]
    for kind, cells in table.items():
        if kind != "fits":
            lines.append(
                f"{_printable(kind):64}{cells['n']:6}{cells['bias']:8.1f}{cells['mean']:8.1f}{cells['p90']:8.1f}"
            )
    fits = table["fits"]
    for status, words in (("oom", "failed for memory"), ("ok", "ran")):
        lines.append(f"{words} and told so: {fits.get(f'{status}_told', 0):.0f} of {fits.get(status, 0):.0f}")
    return "\n".join(lines)


def _printable(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def macro(table: Mapping[str, Cells]) -> dict[str, float]:
    """Return medians and 90th percentiles, averaged over the groups."""
    keys = ("median", "p90", "mean", "median_after_one_scalar")
    return {key: statistics.fmean(cells[key] for cells in table.values()) for key in keys}


def show(table: Mapping[str, Cells]) -> str:
    """Return the table as text."""
    heads = ("n", "median_ratio", "mean", "median", "p90", "max", "median_after_one_scalar", "mean_of_constant_share")
    names = ("n", "ratio", "mean", "median", "p90", "max", "1 scalar", "constant", "Calculon")
    lines = [f"{'group':24}" + "".join(f"{name:>10}" for name in names)]
    for group, cells in table.items():
        values = [cells[head] for head in (*heads, "mean_of_calculon")]
        lines.append(
            f"{_printable(group):24}" + "".join(f"{'-':>10}" if value is None else f"{value:10.3g}" for value in values)
        )
    total = macro(table)
    lines.append(
        f"over groups: median {total['median']:.1f} %, p90 {total['p90']:.1f} %, mean {total['mean']:.1f} %, "
        f"median after one scalar {total['median_after_one_scalar']:.1f} %"
    )
    return "\n".join(lines)
