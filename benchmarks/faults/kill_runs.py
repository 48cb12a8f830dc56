"""Kill a long run at random instants and let it go on: is each sample used once, are the numbers an undisturbed run's?

python -m benchmarks.faults.kill_runs --kills 500 --out FILE
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.faults import epochs
from benchmarks.faults.in_memory import memory_directory
from benchmarks.faults.report import run_rows

import meshwright as mw
from meshwright.errors import WorkerKilledError
from meshwright.ranks.processes import rank_environment
from meshwright.testing import pool

PLANS = {
    "dp=2,zero=1": 2,
    "dp=2": 2,
    "tp=2": 2,
    "pp=2,micro_batches=3": 2,
    "dp=3,zero=3": 3,
    "pp=2,schedule=zb-h1,micro_batches=4": 2,
    "single": 1,
    "dp=2,zero=2": 2,
}
UNCHANGED = ("dp=2,zero=1", "tp=2", "pp=2,micro_batches=3", "dp=3,zero=3")
_LONGEST_S = 0.25
"""A kill comes within this time of a rank's first news [s]."""


class Killer:
    """Kills one rank some time after it has told of itself."""

    def __init__(self, rank: int, news: str, delay_s: float) -> None:
        self._rank, self._news, self._delay_s = rank, news, delay_s
        self._process: int | None = None
        self._timer: threading.Timer | None = None

    def hear(self, rank: int, event: dict[str, Any]) -> None:
        """Take an event of a rank."""
        if rank != self._rank:
            return
        if "pid" in event:
            self._process = os.pidfd_open(event["pid"])  # which never means a later process
        if self._news in event and self._timer is None:
            self._timer = threading.Timer(self._delay_s, self._kill)
            self._timer.start()

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._process is not None:
            os.close(self._process)


class Run:
    """A run of many launches, and what each of its steps was seen to do."""

    def __init__(self, directory: Path, num_steps: int, save_every: int, dropout: float, *, background: bool) -> None:
        self._arguments = (str(directory), num_steps, save_every, dropout, background)
        self.steps: dict[int, tuple[tuple[int, ...], float]] = {}
        self.failures: list[str] = []
        self.num_kills = 0
        self._tolerance = 0.0 if dropout else 1e-9
        self.final: dict[str, Any] = {}

    def launch(self, plan: str, killer: Killer | None) -> bool:
        """Go on once; return whether the run came to its end."""
        events: list[tuple[int, dict[str, Any]]] = []

        def hear(rank: int, event: dict[str, Any]) -> None:
            events.append((rank, event))
            if killer is not None:
                killer.hear(rank, event)

        try:
            found = mw.launch(epochs.go_on, PLANS[plan], plan, *self._arguments, threads_per_rank=1, on_event=hear)
            self.final = found[0]
        except WorkerKilledError:
            self.num_kills += 1
        except mw.MeshwrightError as error:
            self.failures.append(f"{plan}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            if killer is not None:
                killer.close()
        self._note(plan, events)
        return bool(self.final)

    def _note(self, plan: str, events: list[tuple[int, dict[str, Any]]]) -> None:
        loaded = {event["loaded"] for _, event in events if "loaded" in event}
        if len(loaded) > 1:
            self.failures.append(f"{plan}: ranks have loaded {sorted(loaded)}")
        if any(step and step not in self.steps for step in loaded):
            self.failures.append(f"{plan}: loaded {loaded}, a step that nobody was seen to take")
        shares: dict[int, set[tuple[int, ...]]] = {}
        told: dict[int, set[int]] = {}
        losses: dict[int, float] = {}
        for rank, event in events:
            if "step" in event:
                shares.setdefault(event["step"], set()).add(tuple(event["ids"]))
                told.setdefault(event["step"], set()).add(rank)
                losses[event["step"]] = event["loss"]
        for step, found in shares.items():
            if len(told[step]) < PLANS[plan]:
                continue  # a rank was killed before it told
            self._compare(plan, step, tuple(sorted(number for share in found for number in share)), losses[step])

    def _compare(self, plan: str, step: int, ids: tuple[int, ...], loss: float) -> None:
        before_ids, before_loss = self.steps.setdefault(step, (ids, loss))
        if before_ids != ids:
            self.failures.append(f"{plan}: step {step} took other samples than before")
        if abs(before_loss - loss) > self._tolerance * abs(loss):
            self.failures.append(f"{plan}: step {step} had loss {loss!r}, before {before_loss!r}")

    def check_epochs(self, num_steps: int) -> None:
        """Note each epoch in which a sample was not used exactly once."""
        if sorted(self.steps) != list(range(1, num_steps + 1)):
            self.failures.append(f"{num_steps - len(self.steps)} steps were not seen whole")
            return
        each = -(-epochs.NUM_SAMPLES // epochs.GLOBAL_BATCH)
        for start in range(1, num_steps + 1 - each, each):
            ids = sorted(number for step in range(start, start + each) for number in self.steps[step][0])
            if ids != list(range(epochs.NUM_SAMPLES)):
                self.failures.append(f"the epoch from step {start} used other than each sample once")


def undisturbed(plan: str, num_steps: int, save_every: int, dropout: float) -> Run:
    """Return a run that nobody disturbs."""
    with memory_directory() as directory:
        run = Run(Path(directory) / "checkpoints", num_steps, save_every, dropout, background=False)
        run.launch(plan, None)
        return run


def disturbed(
    plan: str | None, seed: int, kills: int, num_steps: int, save_every: int, background: bool
) -> dict[str, Any]:
    """Kill a run until it has had its kills, then let it end; compare it with one that nobody disturbs.

    Args:
        plan: The plan of all launches; None takes another one at random each time.
        seed: Seed of instants, ranks and plans.
        kills: How often [count].
        num_steps: Steps of the run [count].
        save_every: Steps from one save to the next [count].
        background: Whether all saves are in the background; else every other one.
    """
    pool.keep_templates(rank_environment("", 1, None), ("torch._dynamo",))
    source = random.Random(seed)
    # Under one plan dropout draws the same numbers again; under another it draws others, by contract.
    dropout = 0.1 if plan else 0.0
    used: dict[str, int] = {}
    with memory_directory() as directory:
        run = Run(Path(directory) / "checkpoints", num_steps, save_every, dropout, background=background)
        is_over = False
        while not is_over and not run.failures:
            own = plan or source.choice(list(PLANS))
            used[own] = used.get(own, 0) + 1
            news = source.choice(["pid", "loaded", "step", "step", "step"])
            # So many steps at a time that the kills are spread over the run.
            killer = Killer(source.randrange(PLANS[own]), news, source.uniform(0.0, _LONGEST_S))
            is_over = run.launch(own, killer if run.num_kills < kills else None)
    run.check_epochs(num_steps)
    calm = undisturbed(plan or "single", num_steps, save_every, dropout)
    if not calm.final:
        raise RuntimeError(f"the undisturbed run was killed {calm.num_kills} times and failed with {calm.failures}")
    is_same = run.final.get("digest") == calm.final["digest"]
    furthest = 0.0
    for name, expected in calm.final["state"].items():
        right = torch.tensor(expected, dtype=torch.float64)
        mine = torch.tensor(run.final["state"][name], dtype=torch.float64) if run.final else torch.zeros_like(right)
        furthest = max(furthest, ((right - mine).abs().max() / right.abs().max()).item())
    if plan and not is_same:
        run.failures.append(f"the final state differs by {furthest:.1e}")
    if not furthest <= 1e-9:
        run.failures.append(f"the final state is {furthest:.1e} off one device's")
    order = [step for step in calm.steps if calm.steps[step][0] != run.steps.get(step, ((), 0.0))[0]]
    if order:
        run.failures.append(f"{len(order)} steps took other samples than undisturbed, first {min(order)}")
    return {
        "plan": plan or "another at random",
        "launches": used,
        "kills": run.num_kills,
        "steps": len(run.steps),
        "equal": is_same,
        "furthest": furthest,
        "failures": run.failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=500, help="of all runs together; half of them under changing plans"
    )
    parser.add_argument("--steps", type=int, default=3000, help="of each run")
    parser.add_argument("--save-every", type=int, default=7)
    parser.add_argument("--background", action="store_true", help="all saves in the background, not every other one")
    parser.add_argument("--out", type=Path, help="results; rows that it has already are not run again")
    options = parser.parse_args()
    each = options.kills // (2 * len(UNCHANGED))
    rows: list[tuple[str | None, int]] = [(plan, each) for plan in UNCHANGED]
    rows.append((None, options.kills - each * len(UNCHANGED)))
    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (
            f"{plan or 'plans in turn'}, {kills} kills" + (", all in the background" if options.background else ""),
            functools.partial(
                disturbed, plan, 11 + number, kills, options.steps, options.save_every, options.background
            ),
        )
        for number, (plan, kills) in enumerate(rows)
    ]
    return 1 if run_rows(cases, options.out, ("kills", "steps", "failures"))["totals"]["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
