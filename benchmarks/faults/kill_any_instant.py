"""Kill a random rank at a random instant, many times: is it named, how soon, and what is left?

python -m benchmarks.faults.kill_any_instant --count 200
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults import leaks
from tests.faults.jobs import rank_jobs as jobs
from tests.faults.killer import Killer, is_rank

from meshwright.errors import WorkerKilledError
from meshwright.ranks.launch import launch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from surroundings import environment  # noqa: E402

LIMIT_S = 3.0
WINDOW_S = 4.0
STEPS = 10**7


def one(seed: int) -> dict[str, Any]:
    """One kill: what was done, and what came of it."""
    source = random.Random(seed)
    num = source.randint(2, 4)
    rank = source.randrange(num)
    instant_s = source.uniform(0.0, WINDOW_S)
    watch = leaks.Watch()
    os.environ[leaks.MARK_VARIABLE] = watch.mark
    killer = Killer(watch, is_rank(rank, num), instant_s)
    killer.start()
    sample: dict[str, Any] = {"seed": seed, "ranks": num, "rank": rank, "instant_s": round(instant_s, 4)}
    try:
        launch(jobs.train, num, STEPS)
        sample["error"] = "none"
    except BaseException as error:
        sample["error_s"] = round(time.monotonic() - killer.killed_at, 4)
        sample["error"] = str(error)
        sample["named"] = isinstance(error, WorkerKilledError) and error.rank == rank and error.signal_name == "SIGKILL"
    killer.join()
    try:
        sample["gone_after_s"] = round(watch.assert_nothing_left(), 4)
        sample["left"] = None
    except AssertionError as left:
        sample["left"] = str(left)
    sample["passed"] = bool(sample.get("named")) and sample["error_s"] < LIMIT_S and sample["left"] is None
    return sample


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    times = sorted(sample["error_s"] for sample in samples if "error_s" in sample)
    return {
        "count": len(samples),
        "passed": sum(sample["passed"] for sample in samples),
        "named": sum(bool(sample.get("named")) for sample in samples),
        "left_something": sum(sample["left"] is not None for sample in samples),
        "error_s": {
            "median": statistics.median(times),
            "p95": times[int(0.95 * (len(times) - 1))],
            "max": times[-1],
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kill_any_instant.json")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    before = environment()
    samples = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.count):
        sample = one(seed)
        samples.append(sample)
        verdict = "ok" if sample["passed"] else "FAILED"
        print(
            f"{verdict} seed {seed}: rank {sample['rank']} of {sample['ranks']} {sample.get('error_s')} s", flush=True
        )
    found = summary(samples)
    record = {"environment": before, "command": sys.argv, "summary": found, "samples": samples}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0 if found["passed"] == found["count"] else 1


if __name__ == "__main__":
    sys.exit(main())
