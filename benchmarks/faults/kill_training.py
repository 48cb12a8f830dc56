"""Kill training in each of its saves, go on from what is there, again and again: are the numbers those of an undisturbed run?

python -m benchmarks.faults.kill_training --count 200 --out FILE
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.in_memory import memory_directory
from benchmarks.faults.report import run_rows
from tests.faults.jobs import saving_jobs as jobs

import meshwright as mw
from meshwright.errors import WorkerKilledError
from meshwright.ranks.processes import rank_environment
from meshwright.testing import pool

PLANS = {"dp=2,zero=1": 2, "dp=2,zero=3": 2, "tp=2": 2}
_MOST_OPERATIONS = 24


class History:
    """One run under a plan, killed in save after save; and what the same run does when nobody disturbs it."""

    def __init__(self, plan: str, num_ranks: int, num_steps: int) -> None:
        self.plan, self.num_ranks = plan, num_ranks
        self.undisturbed = mw.launch(jobs.train, num_ranks, plan, (0, num_steps), threads_per_rank=1)

    def go_on(
        self, directory: Path, kill: tuple[int, int, str] | None, in_background: bool, least: int
    ) -> dict[str, Any]:
        """Go on once; return what was loaded and saved, and what was wrong with it.

        Args:
            directory: Of the checkpoints.
            kill: Who is killed and when.
            in_background: How is saved.
            least: The step that was certainly saved before.
        """
        events: list[tuple[int, dict[str, Any]]] = []
        failures: list[str] = []
        is_killed = False
        try:
            mw.launch(
                jobs.go_on,
                self.num_ranks,
                self.plan,
                str(directory),
                kill,
                in_background,
                threads_per_rank=1,
                on_event=lambda rank, event: events.append((rank, event)),
            )
        except WorkerKilledError as error:
            is_killed = True
            if kill is None or error.rank != kill[0]:
                failures.append(f"another rank is named: {error}")
        except mw.MeshwrightError as error:
            failures.append(f"{type(error).__name__}: {error}")
        loaded = {event["loaded"] for _, event in events if "loaded" in event}
        if len(loaded) != 1:
            failures.append(f"ranks have loaded {sorted(loaded)}")
        elif min(loaded) < least:
            failures.append(f"step {least} had been saved, step {min(loaded)} was loaded")
        for rank, event in events:
            if "digest" in event:
                digest, loss = self.undisturbed[rank][event["step"] - 1]
                if event["loss"] != loss or event["digest"] != digest:
                    failures.append(f"rank {rank}, step {event['step']}: other numbers than undisturbed")
        saved = [event["saved"] for _, event in events if "saved" in event]
        operation = [event["killed at"] for _, event in events if "killed at" in event]
        return {
            "kill": kill,
            "in_background": in_background,
            "is_killed": is_killed,
            "operation": operation[0] if operation else "",
            "loaded": max(loaded, default=-1),
            "saved": max(saved, default=0),
            "failures": failures,
        }


def kills(num_ranks: int, seed: int) -> Iterator[tuple[tuple[int, int, str], bool]]:
    """Yield who is killed at which operation, and how is saved: all of them, in a random order, for ever."""
    source = random.Random(seed)
    while True:
        every = [(rank, number) for rank in range(num_ranks) for number in range(_MOST_OPERATIONS)]
        for rank, number in source.sample(every, len(every)):
            yield (rank, number, source.choice(["before", "after", "middle"])), source.random() < 0.5


def one(plan: str, num_ranks: int, seed: int, count: int, background: bool) -> dict[str, Any]:
    """One run that is killed `count` times; with `background` all its saves are there, else some."""
    pool.keep_templates(rank_environment("", 1, None), ("torch._dynamo",))
    history = History(plan, num_ranks, count + 1)
    failures: list[str] = []
    num_killed = least = 0
    turns = kills(num_ranks, seed)
    loaded: list[int] = []
    with memory_directory() as directory:
        for _ in range(count):
            kill, in_background = next(turns)
            in_background = in_background or background
            found = history.go_on(Path(directory) / "checkpoints", kill, in_background, least)
            num_killed += found["is_killed"]
            loaded.append(found["loaded"])
            least = max(least, found["loaded"], found["saved"])
            failures += [f"{kill}: {failure}" for failure in found["failures"]]
    return {"plan": plan, "seed": seed, "launches": count, "kills": num_killed, "loaded": loaded, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="launches")
    parser.add_argument("--each", type=int, default=10, help="launches of one run")
    parser.add_argument("--background", action="store_true", help="all saves in the background")
    parser.add_argument("--out", type=Path, help="results; rows that it has already are not run again")
    options = parser.parse_args()
    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for seed in range(options.count // options.each):
        plan, num_ranks = list(PLANS.items())[seed % len(PLANS)]
        cases.append(
            (f"{plan}, seed {seed}", functools.partial(one, plan, num_ranks, seed, options.each, options.background))
        )
    return 1 if run_rows(cases, options.out, ("launches", "kills", "failures"))["totals"]["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
