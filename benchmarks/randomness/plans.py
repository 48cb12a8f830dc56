"""Losses with random numbers by place under many plans, beside one process; and after a resume under another plan.

python -m benchmarks.randomness.plans --out FILE
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.surroundings import environment
from tests.parity.jobs.drawing_jobs import Trained, train

import meshwright as mw
from meshwright import testing

CASES = ("gpt", "vit", "vae", "lstm")
PLANS = (
    "micro_batches=3",
    "micro_batch_size=2",
    "micro_batches=2,recompute=full",
    "dp=2",
    "dp=2,micro_batches=2,recompute=selective",
    "dp=3,zero=1",
    "dp=2,zero=2,micro_batches=3",
    "dp=2,zero=3,recompute=full",
    "tp=2",
    "tp=2,micro_batches=2,recompute=full",
    "tp=4",
    "pp=2,micro_batches=3,schedule=gpipe",
    "pp=2,micro_batches=3,recompute=full",
    "pp=2,virtual=2,micro_batches=2,schedule=interleaved",
    "pp=2,micro_batches=3,schedule=zb-h1",
    "pp=2,virtual=2,micro_batches=3,schedule=zbv",
    "dp=2,tp=2",
    "dp=2,pp=2,micro_batches=2",
    "tp=2,pp=2,micro_batches=2",
)
RESUMED = "dp=2,micro_batches=2"
"""The plan under which a run is saved that goes on under the others."""
STEPS = 3


def gap(found: Trained, wanted: Trained, first: int = 0) -> float:
    """Return the largest relative difference of losses and norms."""
    last = first + len(found.losses)
    pairs = zip(found.losses + found.norms, wanted.losses[first:last] + wanted.norms[first:last], strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)


def measure(case: str, line: str, wanted: Trained, saved: str) -> dict[str, Any]:
    """Return how far a plan is from one process, from the start and after a resume."""
    start, num_ranks = time.perf_counter(), mw.Plan.parse(line).num_ranks
    row: dict[str, Any] = {"case": case, "plan": line}
    try:
        ranks = testing.run_ranks(functools.partial(train, steps=STEPS), num_ranks, case, line)
        again = functools.partial(train, steps=STEPS, first=STEPS, directory=saved)
        rest = testing.run_ranks(again, num_ranks, case, line)
    except mw.MeshwrightError as error:
        return row | {"refused": str(error)}
    reasons = sorted({reason for found in ranks for reason in found.reasons})
    row |= {"gap": gap(ranks[0], wanted), "resumed_gap": gap(rest[0], wanted, STEPS), "reasons": reasons}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    """Run every case under every plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="*", default=CASES)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        wanted = testing.run_ranks(functools.partial(train, steps=2 * STEPS), 1, case, "single")[0]
        with tempfile.TemporaryDirectory() as saved:
            testing.run_ranks(functools.partial(train, steps=STEPS, directory=saved), 2, case, RESUMED)
            for line in PLANS:
                rows.append(measure(case, line, wanted, saved))
                print(json.dumps(rows[-1]), flush=True)
                if arguments.out is not None:
                    arguments.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
