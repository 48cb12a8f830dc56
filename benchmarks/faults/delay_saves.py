"""Delay each operation on files of saves by a random time, on each rank, beside training: is each checkpoint its step's state?

python -m benchmarks.faults.delay_saves --runs 40 --out FILE
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults import delays
from benchmarks.faults.in_memory import memory_directory
from benchmarks.faults.report import run_rows
from tests.parity.jobs import checkpoint_jobs as jobs

from meshwright import testing
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store

PLANS = {
    "dp=2": 2,
    "dp=2,zero=3,whole_below=1": 2,
    "tp=2": 2,
    "pp=2,micro_batches=2": 2,
    "pp=2,schedule=zbv,micro_batches=4": 2,
    "dp=2,tp=2": 4,
}
_NO_SPACE = "No space left on device"


def one(plan: str, seed: int, num_steps: int, *, fails: bool) -> dict[str, Any]:
    """One run under a plan, and what was wrong with it."""
    with memory_directory() as directory:
        root = Path(directory) / "checkpoints"
        job = functools.partial(delays.run, plan, str(root), seed, num_steps, fails=fails)
        ranks = testing.run_ranks(job, PLANS[plan])
        failures = [f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in found["wrong"]]
        errors = [found["errors"] for found in ranks]
        has_failed = any(found["failed"] for found in ranks)
        if len(errors[0]) > has_failed or any(len(one) != len(errors[0]) for one in errors):
            failures.append(f"ranks have met {errors}")
        failures += [f"another cause is told: {text}" for one in errors for text in one if _NO_SPACE not in text]
        if Store(root).saved():
            failures += other_plan(plan, root, Path(directory))
    return {
        "plan": plan,
        "seed": seed,
        "saves": ranks[0]["saves"],
        "loads": ranks[0]["loads"],
        "disks": int(has_failed),
        "failures": failures,
    }


def other_plan(plan: str, root: Path, directory: Path) -> list[str]:
    """Load the newest under another plan, save it there, and compare."""
    other = "tp=2" if plan.startswith("dp") else "dp=2,zero=1"
    testing.run_ranks(functools.partial(jobs.resave, other, "words", "adamw", str(root), str(directory / "other")), 2)
    wrong = []
    with (
        OpenCheckpoint(Store(root).saved()[0].path) as mine,
        OpenCheckpoint(Store(directory / "other").saved()[0].path) as its,
    ):
        names = [name for name in mine.manifest.tensors if not name.startswith("random/")]
        wrong += [f"under {other}: {name}" for name in names if not mine.read(name).equal(its.read(name))]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=36, help="runs; in every third one a disk is full once")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="of each run; there is about one save for each")
    parser.add_argument("--out", type=Path, help="results; rows that it has already are not run again")
    options = parser.parse_args()
    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        plan, fails = list(PLANS)[seed % len(PLANS)], seed // len(PLANS) % 3 == 2
        name = f"{plan}, seed {seed}" + (", a full disk" if fails else "")
        cases.append((name, functools.partial(one, plan, seed, options.steps, fails=fails)))
    totals = run_rows(cases, options.out, ("saves", "loads", "disks", "failures"))["totals"]
    testing.close_pools()
    return 1 if totals["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
