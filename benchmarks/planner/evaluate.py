"""Predictions for published rows, and their errors by group.

python -m benchmarks.planner.evaluate ROWS.json [ROWS.json ...] --json OUT
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.planner import errors
from benchmarks.planner.rows import cluster_of, model_of, setup_of

from meshwright.errors import MeshwrightError
from meshwright.plan.costs.step_costs import StepCost, StepCosts
from meshwright.units import format_bytes

READ: dict[str, tuple[float, float]] = {
    "allocated": (1.0, 0.0),
    "reserved": (1.12, 0.0),
    "smi": (1.15, 1.5e9),
    "device": (1.15, 1.5e9),
    "unstated": (1.2, 0.5e9),
}
"""Word of how memory was read -> (over what tensors take [ratio], beside it [bytes]); the first that is found. Gaps of PyTorch's
allocator grow with what it holds; CUDA's context, its libraries and NCCL's channels do not. One pair for each kind, fitted to all
rows that read memory so."""

NEEDED = (1.1, 1.5e9)
"""What a device must have, in the same words: the allocator gives some of its gaps back before it fails."""


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
        if not (0 < cost.step_s < math.inf and 0 < cost.memory.peak < math.inf):
            raise ValueError(
                f"step of {cost.step_s} s with {cost.memory.peak} bytes: a size, degree or batch of the row is none"
            )
        limit = (row["hardware"].get("gpu_mem_GB") or cluster_of(row).device.memory_bytes / 1e9) * 1e9
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
            "id": row.get("id"),
            "step_time_s": cost.step_s,
            "peak_memory_bytes": round(as_read(cost.memory.peak, row.get("mem_kind"))),
            "fits": cost.memory.peak * NEEDED[0] + NEEDED[1] <= limit,
            "why": f"{shares}; {format_bytes(cost.memory.peak)} allocated",
        }

    def answer_or_reason(self, row: errors.Row) -> dict[str, Any]:
        """Return the answer to any row; one that lacks what is needed, or says what cannot be, gets nothing but the reason."""
        try:
            return self.answer(row)
        except (
            MeshwrightError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            LookupError,
        ) as error:
            nothing = {"step_time_s": None, "peak_memory_bytes": None, "fits": None}
            name = row.get("id") if isinstance(row, dict) else None
            return {"id": name, **nothing, "why": f"{type(error).__name__}: {error}"}


def as_read(peak: float, kind: str | None) -> float:
    """Return what a way to read memory shows where tensors take ``peak``; nobody says how: what tensors take [bytes]."""
    share, beside = next((pair for word, pair in READ.items() if word in str(kind or "").lower()), (1.0, 0.0))
    return peak * share + beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[errors.Row] = [row for path in options.rows for row in json.loads(path.read_text(encoding="utf-8"))]
    judge = Judge()
    answers = [judge.answer_or_reason(row) for row in rows]
    predicted = {id(row): answer for row, answer in zip(rows, answers, strict=True)}
    known = [row for row in errors.usable(rows) if predicted[id(row)]["step_time_s"] is not None]
    table = errors.errors_of(known, lambda row: predicted[id(row)]["step_time_s"]) if known else {}
    print(errors.show(table) if table else "no row has a step time to compare with")
    memory = errors.memory_errors([(row, answer) for row, answer in zip(rows, answers, strict=True)])
    print(errors.show_memory(memory))
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": answers, "errors": table, "memory": memory}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
