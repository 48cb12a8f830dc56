"""Errors of predictions against published rows, by group, beside the floor of a constant share of the peak."""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

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


def usable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose step time is known and may be compared, each once."""
    found = {
        row["id"]: row
        for row in rows
        if row["status"] == "ok"
        and "time" in (row.get("usable_for") or ())
        and (row["measured"].get("step_time_s") or 0) > 0
    }
    return list(found.values())


def read(paths: Sequence[Path]) -> list[Row]:
    """Return the usable rows of JSON files."""
    return usable([row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))])


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    return dict(groups)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def errors_of(rows: Sequence[Row], seconds: Callable[[Row], float]) -> dict[str, dict[str, float]]:
    """Return for each group n, bias, mean, median, 90th percentile and maximum of the absolute errors, in percent."""
    table: dict[str, dict[str, float]] = {}
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
            "mean_of_constant_share": statistics.fmean(floor) if floor else float("nan"),
            "mean_of_calculon": CALCULON_MEAN.get(group, float("nan")),
        }
    return table


def constant_share(rows: Sequence[Row]) -> list[float]:
    """Return the errors of the constant share of the peak that suits each GPU, precision and recompute of a group best."""
    cells: dict[tuple[object, ...], list[float]] = collections.defaultdict(list)
    for row in rows:
        tokens = row["batch"]["global"] * row["model"]["seq"]
        work = flops(row) * tokens / row["hardware"]["gpus"]
        cells[row["hardware"]["gpu"], row.get("precision"), row.get("recompute")].append(
            work / row["measured"]["step_time_s"]
        )
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


def macro(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return medians and 90th percentiles, averaged over the groups."""
    keys = ("median", "p90", "mean", "median_after_one_scalar")
    return {key: statistics.fmean(cells[key] for cells in table.values()) for key in keys}


def show(table: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table as text."""
    heads = ("n", "median_ratio", "mean", "median", "p90", "max", "median_after_one_scalar", "mean_of_constant_share")
    names = ("n", "ratio", "mean", "median", "p90", "max", "1 scalar", "constant", "Calculon")
    lines = [f"{'group':24}" + "".join(f"{name:>10}" for name in names)]
    for group, cells in table.items():
        values = [cells[head] for head in heads] + [cells["mean_of_calculon"]]
        lines.append(f"{group:24}" + "".join(f"{value:10.3g}" for value in values))
    total = macro(table)
    lines.append(
        f"over groups: median {total['median']:.1f} %, p90 {total['p90']:.1f} %, mean {total['mean']:.1f} %, "
        f"median after one scalar {total['median_after_one_scalar']:.1f} %"
    )
    return "\n".join(lines)
