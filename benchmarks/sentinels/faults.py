"""What sentinels catch: one fault on one rank of a run, for each kind of plan and dtype; and runs without a fault.

    python benchmarks/sentinels/faults.py --out benchmarks/sentinels/results/faults.json
    python benchmarks/sentinels/faults.py --quick

A fault comes before step 5 or, where it says "at a sentinel", before step 8; a sentinel comes every 4 steps. It is caught where
every rank stops at most 4 steps later, and named right where the error names the rank and the tensor, the batch or the setting.
Of two copies that differ neither says which is wrong: there both ranks are named.

Exit status 1 where a fault that has to be caught is not, one is named wrong, or a run without a fault is stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fault_jobs  # noqa: E402

from meshwright import testing  # noqa: E402
from surroundings import environment  # noqa: E402

PLANS = {
    "dp=2": 2,
    "dp=2,zero=1": 2,
    "dp=2,zero=2": 2,
    "dp=2,zero=3,whole_below=0": 2,
    "tp=2": 2,
    "pp=2,micro_batches=2": 2,
    "dp=2,tp=2": 4,
    "dp=2,pp=2,micro_batches=2": 4,
    "tp=2,pp=2,micro_batches=2": 4,
}
EVERY, STEP, SENTINEL_STEP, NUM_STEPS = 4, 5, 8, 13


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault and when it comes; `plans` are words that a plan must have one of, `never` those it must not have."""

    title: str
    fault: str
    at: int = STEP
    plans: tuple[str, ...] = ("dp", "tp", "pp")
    must: bool = True
    """Whether it has to be caught; else it is told what happens."""

    def is_for(self, plan: str) -> bool:
        """Whether the fault has a meaning under a plan."""
        return any(word in plan for word in self.plans)


ROWS = (
    Row("one weight of a shard, written in place", "weight_written", plans=("dp", "tp")),
    Row("... where no other rank has a part of it", "weight_written", plans=("pp=2,micro",), must=False),
    Row("one bit of a weight, at a sentinel", "weight_bit", SENTINEL_STEP),
    Row("one bit of a weight, between", "weight_bit", must=False),
    Row("one bit of the optimizer's state, at a sentinel", "state_bit", SENTINEL_STEP),
    Row("one bit of the optimizer's state, between", "state_bit", must=False),
    Row("one bit of a copied parameter, at a sentinel", "copy_bit", SENTINEL_STEP),
    Row("one bit of a copied parameter, between", "copy_bit", must=False),
    Row("one bit of a buffer, at a sentinel", "buffer_bit", SENTINEL_STEP),
    Row("one row of a batch that ranks share", "other_row", plans=("tp", "pp")),
    Row("one value of what a stage receives, from then on", "stage_input", plans=("pp",)),
    Row("another learning rate", "other_rate"),
    Row("another weight decay", "other_decay"),
    Row("a number drawn on one rank", "extra_draw", plans=("tp",), must=False),
    Row("a wrong layout forced", "wrong_layout", at=0, plans=("tp",)),
)


def outcome(row: Row, plan: str, dtype: str) -> dict[str, Any]:
    """Run one fault; return what became of it."""
    dropout = 0.3 if row.fault == "extra_draw" else 0.0
    per_rank = testing.run_ranks(fault_jobs.run, PLANS[plan], plan, dtype, row.fault, row.at, EVERY, NUM_STEPS, dropout)
    told = per_rank[0]
    name = next((rank["name"] for rank in per_rank if rank["name"]), "")
    found: dict[str, Any] = {"fault": row.title, "plan": plan, "dtype": dtype, "by": told["error"]}
    same = all((rank["error"], rank["steps"]) == (told["error"], told["steps"]) for rank in per_rank)
    found["caught"] = bool(told["error"]) and same and told["steps"] <= row.at + EVERY
    found["steps"] = told["steps"] - row.at if told["error"] else None
    faulty = fault_jobs.faulty_rank(row.fault, PLANS[plan])
    ranks = {
        int(number)
        for group in re.findall(r"rank\S* (\d+|\[[\d, ]+\])", told["text"])
        for number in re.findall(r"\d+", group)
    }
    is_rank = row.fault == "wrong_layout" or told["rank"] in (None, faulty) or faulty in ranks
    found["named"] = bool(told["error"]) and name in told["text"] and is_rank
    found["text"] = told["text"].splitlines()[0] if told["text"] else ""
    if row.fault == "extra_draw":
        found["losses_equal"] = all(rank.get("losses") == told.get("losses") for rank in per_rank)
    return found


def show(found: dict[str, Any]) -> str:
    """Return a cell of the table."""
    if not found["by"]:
        return "mended, told in the log" if found.get("losses_equal") else "-"
    how = "at once" if not found["steps"] else f"after {found['steps']} steps"
    return (how if found["caught"] else f"LATE, {how}") + ("" if found["named"] else ", NAMED WRONG")


def false_alarms(plans: list[str], dtypes: list[str], num_steps: int) -> list[dict[str, Any]]:
    """Run without a fault, with dropout, a sentinel at every third step; return what was stopped."""
    found = []
    for plan in plans:
        for dtype in dtypes:
            told = testing.run_ranks(fault_jobs.run, PLANS[plan], plan, dtype, "", 0, 3, num_steps, 0.2)[0]
            found.append({"plan": plan, "dtype": dtype, "steps": told["steps"], "text": told["text"]})
            print(f"no fault: {plan:28} {dtype:9} {told['steps']} steps {told['text'][:90]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--dtypes", nargs="+", choices=list(fault_jobs.DTYPES), default=list(fault_jobs.DTYPES))
    parser.add_argument("--steps", type=int, default=50, help="of a run without a fault")
    parser.add_argument("--quick", action="store_true", help="float32 and three plans alone: does it run?")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.plans, arguments.dtypes, arguments.steps = ["dp=2", "tp=2", "pp=2,micro_batches=2"], ["float32"], 12
    found, wrong = [], 0
    for plan in arguments.plans:
        for row in (row for row in ROWS if row.is_for(plan)):
            cells = [outcome(row, plan, dtype) for dtype in arguments.dtypes]
            shown = list(dict.fromkeys(map(show, cells)))
            wrong += sum((row.must and not cell["caught"]) or bool(cell["by"] and not cell["named"]) for cell in cells)
            print(f"{plan:28} {row.title:52} {' | '.join(shown)}", flush=True)
            found += cells
    alarms = false_alarms(arguments.plans, arguments.dtypes, arguments.steps)
    testing.close_pools()
    if arguments.out is not None:
        text = json.dumps({"environment": environment(), "faults": found, "without_a_fault": alarms}, indent=1)
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(text + "\n")
    num_alarms = sum(bool(run["text"]) for run in alarms)
    print(f"{len(found)} faults, {wrong} not caught or named wrong; {len(alarms)} runs without, {num_alarms} stopped")
    return int(bool(wrong or num_alarms))


if __name__ == "__main__":
    sys.exit(main())
