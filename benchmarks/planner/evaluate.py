"""Predictions for published rows, and their errors by group.

python -m benchmarks.planner.evaluate ROWS.json [ROWS.json ...] --json OUT
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.planner import errors
from benchmarks.planner.rows import cluster_of, model_of, setup_of

from meshwright.plan.costs.step_costs import StepCost, StepCosts
from meshwright.units import GIB, format_bytes


class Judge:
    """Costs of rows; rows of one model and cluster share what they can."""

    def __init__(self) -> None:
        self._costs: dict[tuple[int, object], StepCosts] = {}

    def cost(self, row: errors.Row) -> StepCost:
        model, cluster = model_of(row), cluster_of(row)
        costs = self._costs.setdefault((id(model), cluster), StepCosts(model, cluster))
        return costs.cost(setup_of(row))

    def answer(self, row: errors.Row) -> dict[str, Any]:
        """Return what is predicted for a row: seconds, bytes, whether it fits, and why."""
        cost = self.cost(row)
        peak = cost.memory.peak + extra_bytes(row.get("mem_kind"))
        limit = (row["hardware"].get("gpu_mem_GB") or 80) * 1e9
        parts = {
            "forward": cost.forward_s,
            "backward": cost.backward_s,
            "recompute": cost.recompute_s,
            "bubble": cost.bubble_s,
            "exposed communication": cost.exposed_comm_s,
            "optimizer": cost.optimizer_s,
        }
        shares = ", ".join(f"{name} {part / cost.step_s:.0%}" for name, part in parts.items() if part > 0)
        return {
            "id": row["id"],
            "step_time_s": cost.step_s,
            "peak_memory_bytes": round(peak),
            "fits": cost.memory.peak + CONTEXT_BYTES <= limit,
            "why": f"{shares}; {format_bytes(cost.memory.peak)} allocated",
        }


CONTEXT_BYTES = 1.5 * GIB
"""What CUDA, its libraries and NCCL's channels take beside the allocator: an estimate, one number for all rows."""


def extra_bytes(kind: str | None) -> float:
    """Return what a way to read memory counts beside what tensors take."""
    name = (kind or "").lower()
    if "smi" in name or "device" in name:
        return CONTEXT_BYTES
    return 0.5 * GIB if "reserved" in name else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[errors.Row] = [row for path in options.rows for row in json.loads(path.read_text())]
    judge = Judge()
    answers: list[dict[str, Any]] = []
    for row in rows:
        try:
            answers.append(judge.answer(row))
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:  # a row without a field that is needed
            nothing = {"step_time_s": None, "peak_memory_bytes": None, "fits": None}
            answers.append({"id": row["id"], **nothing, "why": f"{type(error).__name__}: {error}"})
    seconds = {answer["id"]: answer["step_time_s"] for answer in answers}
    known = [row for row in errors.usable(rows) if seconds[row["id"]] is not None]
    table = errors.errors_of(known, lambda row: seconds[row["id"]]) if known else {}
    print(errors.show(table) if table else "no row has a step time to compare with")
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": answers, "errors": table}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
