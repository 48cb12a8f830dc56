"""Ranking of published plans: how much slower than the best one is the plan that is predicted to be the fastest?

    python -m benchmarks.planner.regret ROWS.json [ROWS.json ...]

A cell is what one source measured of one model, on as many GPUs, with one global batch: four plans or more. Regret is the
measured time of the plan that is predicted to be fastest over that of the fastest one, less 1. Kendall's tau counts pairs that
are in order, less those that are not.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.planner import errors
from benchmarks.planner.evaluate import Judge

_FEWEST = 4


def cells_of(rows: Iterable[errors.Row]) -> dict[tuple[object, ...], list[errors.Row]]:
    found: dict[tuple[object, ...], dict[str, errors.Row]] = collections.defaultdict(dict)
    for row in rows:
        if (
            row["status"] != "ok"
            or "regret" not in (row.get("usable_for") or ())
            or not row["measured"].get("step_time_s")
        ):
            continue
        model, hardware = row["model"], row["hardware"]
        key = (
            row["group"], model["name"], *(model[name] for name in ("layers", "hidden", "heads", "seq")), hardware["gpu"],
            hardware["gpus"], row["batch"]["global"], row["precision"],
        )  # fmt: skip
        found[key][row["id"]] = row
    return {key: list(own.values()) for key, own in found.items() if len(own) >= _FEWEST}


def judge_cell(rows: list[errors.Row], judge: Judge) -> tuple[float, float, float]:
    """Return regret of the first, of the best of the first three, and tau."""
    costed = [(judge.cost(row).step_s, row["measured"]["step_time_s"]) for row in rows]
    pairs = sorted(costed, key=lambda pair: pair[0])  # rows that are predicted alike stay in the order of the file
    best = min(measured for _, measured in pairs)
    signs = [(one[0] - other[0]) * (one[1] - other[1]) for one, other in itertools.combinations(pairs, 2)]
    ordered, reversed_ = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
    tau = (ordered - reversed_) / max(1, ordered + reversed_)
    return pairs[0][1] / best - 1, min(measured for _, measured in pairs[:3]) / best - 1, tau


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    options = parser.parse_args()
    rows: list[errors.Row] = [row for path in options.rows for row in json.loads(path.read_text())]
    judge = Judge()
    by_group: dict[str, list[tuple[float, float, float]]] = collections.defaultdict(list)
    for key, own in cells_of(rows).items():
        by_group[str(key[0])].append(judge_cell(own, judge))
    by_group["all"] = [cell for cells in list(by_group.values()) for cell in cells]
    print(f"{'source':22}{'cells':>6}{'regret':>9}{'p90':>9}{'of three':>10}{'tau':>7}")
    for group, cells in by_group.items():
        first, three, tau = zip(*cells, strict=True)
        print(
            f"{group:22}{len(cells):6}{statistics.median(first):9.1%}{errors.quantile(first, 0.9):9.1%}"
            f"{statistics.median(three):10.1%}{statistics.median(tau):7.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
