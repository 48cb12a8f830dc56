"""Predictions for published rows, and their errors by group.

    python benchmarks/planner/evaluate.py ROWS.json [ROWS.json ...] --json OUT

A file has a list of rows, one row a line, or an object that has the list as "rows". Each row gets an answer or a reason.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planner import errors
from benchmarks.planner.fields import cleaned
from benchmarks.planner.rows import cluster_of, model_of, setup_of

from meshwright.errors import MeshwrightError
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_costs import StepCost, StepCosts
from meshwright.units import format_bytes

READ: dict[str, tuple[float, float]] = {
    "allocated": (1.0, 0.0),
    "reserved": (1.05, 0.0),
    "smi": (1.15, 1.5e9),
    "device": (1.15, 1.5e9),
    "unstated": (1.2, 0.5e9),
}
"""Word of how memory was read -> (over what tensors take [ratio], beside it [bytes]); the first that is found. Gaps of PyTorch's
allocator grow with what it holds; CUDA's context, its libraries and NCCL's channels do not. One pair for each kind, fitted to all
rows that read memory so."""

NEEDED = (1.05, 1.5e9)
"""What a device must have, in the same words: the allocator gives some of its gaps back before it fails."""

HAS = 0.99 * 2**30
"""Of each GB that a data sheet names, what a device has: nvidia-smi shows 81,559 MiB of an H100 with 80 GB, 143,771 of an H200
with 141, 183,359 of a B200 with 180 [bytes]."""


_MOST_COSTS = 256
"""Models on clusters whose costs are kept at once [count]."""

_LONGEST_S = 1e7
"""A step that takes longer than four months is none [s]."""


class Judge:
    """Costs of rows; rows of one model and cluster share what they can."""

    def __init__(self) -> None:
        self._costs: collections.OrderedDict[tuple[int, object], StepCosts] = collections.OrderedDict()

    def cost(self, row: errors.Row) -> StepCost:
        """Return the cost of a row as a source prints it.

        Raises:
            ValueError: The row lacks what is needed, or says what cannot be.
        """
        return self._cost(cleaned(row))

    def _cost(self, row: errors.Row) -> StepCost:
        model, cluster, setup = model_of(row), cluster_of(row), setup_of(row)
        key = (id(model), cluster)  # costs hold their model, so that no other one has its id meanwhile
        if key not in self._costs:
            self._costs[key] = StepCosts(model, cluster)
        costs = self._costs[key]
        self._costs.move_to_end(key)
        if len(self._costs) > _MOST_COSTS:
            self._costs.popitem(last=False)
        if row["recompute_layers"] is None:
            return costs.cost(setup)
        return _partly(costs, setup, row["recompute_layers"] / max(1.0, row["model"]["layers"] / setup.pp))

    def answer(self, row: errors.Row) -> dict[str, Any]:
        """Return what is predicted for a row: seconds, bytes, whether it fits, and why."""
        name, row = row.get("id") if isinstance(row, dict) else None, cleaned(row)
        cost = self._cost(row)
        if not (0 < cost.step_s < _LONGEST_S and 0 < cost.memory.peak < math.inf):
            raise ValueError(
                f"step of {cost.step_s} s with {cost.memory.peak} bytes: a size, degree or batch of the row is none"
            )
        peak, lightest = self._fitting(row, cost)
        parts = {
            "forward": cost.forward_s,
            "backward": cost.backward_s,
            "recompute": cost.recompute_s,
            "bubble": cost.bubble_s,
            "exposed communication": cost.exposed_comm_s,
            "optimizer": cost.optimizer_s,
        }
        shares = ", ".join(f"{title} {part / cost.step_s:.0%}" for title, part in parts.items() if part > 0)
        unknown = f"; taken for not printed: {', '.join(row['unknown'])}" if row["unknown"] else ""
        return {
            "id": _name(name),
            "step_time_s": cost.step_s,
            "peak_memory_bytes": round(as_read(peak, row["mem_kind"])),
            "fits": _fits(row, peak),
            "why": f"{shares}; {format_bytes(peak)} allocated{lightest}{unknown}",
        }

    def _fitting(self, row: errors.Row, cost: StepCost) -> tuple[float, str]:
        """Return the peak, and what must run again for it: a row that prints nothing of it may have run again what it must."""
        if row["recompute"] is not None or _fits(row, cost.memory.peak):
            return cost.memory.peak, ""
        for kind in ("selective", "full"):
            peak = self._cost(row | {"recompute": kind}).memory.peak
            if _fits(row, peak):
                return peak, f" with {kind} recompute, of which the row says nothing"
        return cost.memory.peak, ""

    def answer_or_reason(self, row: Any) -> dict[str, Any]:
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
            return {"id": _name(name), **nothing, "why": f"{type(error).__name__}: {error}"}


def _fits(row: errors.Row, peak: float) -> bool:
    limit = (row["hardware"].get("gpu_mem_GB") or cluster_of(row).device.memory_bytes / 1e9) * HAS
    return peak * NEEDED[0] + NEEDED[1] <= limit


def _partly(costs: StepCosts, setup: Setup, share: float) -> StepCost:
    """Return the cost where a share of a rank's layers runs again: between that of none and of all."""
    least, most = (costs.cost(dataclasses.replace(setup, recompute=kind)) for kind in ("none", "full"))
    share = min(1.0, share)

    def between(one: Any, other: Any, name: str) -> float:
        return getattr(one, name) + share * (getattr(other, name) - getattr(one, name))

    memory = {field.name: between(least.memory, most.memory, field.name) for field in dataclasses.fields(least.memory)}
    seconds = {
        field.name: between(least, most, field.name)
        for field in dataclasses.fields(least)
        if field.name not in ("memory", "sent_bytes")
    }
    return dataclasses.replace(least, **seconds, memory=dataclasses.replace(least.memory, **memory))


def _name(value: object) -> str | int | None:
    return value if isinstance(value, str | int) or value is None else str(value)


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a file: those of a list, of an object's "rows", or of a file with one row a line."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [_row_of(line) for line in text.splitlines() if line.strip()]
    if isinstance(found, dict) and isinstance(found.get("rows"), list):
        return found["rows"]
    return found if isinstance(found, list) else [found]


def _row_of(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


def as_read(peak: float, kind: str | None) -> float:
    """Return what a way to read memory shows where tensors take ``peak``; nobody says how: what tensors take [bytes]."""
    share, beside = next((pair for word, pair in READ.items() if word in str(kind or "").lower()), (1.0, 0.0))
    return peak * share + beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for path in options.rows for row in read_rows(path)]
    judge = Judge()
    answers = [judge.answer_or_reason(row) for row in rows]
    # The same object may stand in several places: each of them has the same answer.
    predicted = {id(row): answer for row, answer in zip(rows, answers, strict=True)}
    known = [row for row in errors.usable(rows) if predicted[id(row)]["step_time_s"] is not None]
    table = errors.errors_of(known, lambda row: predicted[id(row)]["step_time_s"]) if known else {}
    print(errors.show(table) if table else "no row has a step time to compare with")
    pairs = [(row, answer) for row, answer in zip(rows, answers, strict=True) if isinstance(row, dict)]
    memory = errors.memory_errors(pairs)
    print(errors.show_memory(memory))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"rows": answers, "errors": table, "memory": memory}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    sys.exit(main())
