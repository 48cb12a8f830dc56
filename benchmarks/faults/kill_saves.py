"""Kill a rank at every file operation of a save: is the old or the new checkpoint there, whole, and nothing between?

python -m benchmarks.faults.kill_saves --out FILE
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.faults.in_memory import memory_directory
from benchmarks.faults.report import run_rows
from tests.faults.checkpoint_kills import KilledSave
from tests.faults.checkpoint_saves import SCENARIOS


def one_rank(scenario: str, world: int, rank: int) -> dict[str, Any]:
    """Kill one rank at each of its instants."""
    found: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    failures = []
    instants = 0
    with memory_directory() as directory:
        saves = KilledSave(Path(directory), scenario, world)
        clean = saves.kill(None)
        if clean.found != "new" or any(clean.outcome.statuses):
            failures.append(f"undisturbed: {clean}")
        turns = saves.instants(rank)
        while True:
            try:
                kill, killed = next(turns)
            except StopIteration:
                break
            except AssertionError as error:
                failures.append(str(error))
                break  # the generator is at its end; the instants after this one were not tried
            instants += 1
            found[killed.found] += 1
            operations[f"{killed.operation}, {kill.when}"] += 1
    return {
        "scenario": scenario,
        "world": world,
        "rank": rank,
        "instants": instants,
        "found": dict(found),
        "operations": dict(sorted(operations.items())),
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--out", type=Path, help="results; rows that it has already are not run again")
    options = parser.parse_args()
    cases = (
        (f"{scenario}, {world} ranks, kills of rank {rank}", functools.partial(one_rank, scenario, world, rank))
        for world in map(int, options.worlds.split(","))
        for scenario in SCENARIOS
        for rank in range(world)
    )
    return 1 if run_rows(cases, options.out, ("instants", "failures"))["totals"]["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
