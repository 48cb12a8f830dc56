"""Idle time of pipelines: measured against the schedule's own simulation, and against torch.distributed.pipelining.

    python benchmarks/pipeline/bubble.py --real-time --out benchmarks/pipeline/results/NAME.json

Four ranks, eight blocks that sleep instead of computing (`timed_model.py`). Every side has processes of its own; a round lets
each side take a block of steps of every schedule, in an order that changes from round to round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE), str(HERE.parent / "peers"), str(HERE.parent)]
sys.path[:0] = PATHS

import psutil  # noqa: E402
from bubble_sides import NUM_MICRO_BATCHES, NUM_RANKS, THEIRS, VIRTUAL, Kind, deal, prepare, run_block  # noqa: E402
from plain_ranks import PlainRanks  # noqa: E402
from rounds import order_of  # noqa: E402
from summary import quartiles  # noqa: E402
from timed_model import NUM_BLOCKS, Times  # noqa: E402

from meshwright import PipelineSchedule  # noqa: E402
from meshwright.ranks.launch import RankGroup  # noqa: E402
from meshwright.schedule import Action  # noqa: E402
from surroundings import environment  # noqa: E402

SIDES = ("ours-shm", "ours-gloo", "torch")
BOUND = 0.04
"""How far a measured idle share may lie above the simulated one."""
ZBV_TO_1F1B = 0.5
"""ZBV's idle share is to be under this share of 1F1B's."""
LEAD_IN = 1
WARM_UP = 3
LOSS_TOLERANCE = 1e-5


class Gang:
    """The ranks of one side, which are stopped while it is another one's turn."""

    def __init__(self, name: str, timeout_s: float, *, real_time: bool) -> None:
        self.name = name
        self.is_ours = name.startswith("ours")
        self.steps_taken: Counter[Kind] = Counter()
        self._real_time = real_time
        self._backend = name.removeprefix("ours-") if self.is_ours else "gloo"
        if self.is_ours:
            environment = {"MESHWRIGHT_TRANSPORT": self._backend}
            self.ranks = RankGroup(NUM_RANKS, threads_per_rank=1, env=environment, timeout_s=timeout_s)
        else:
            paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {"PYTHONPATH": os.pathsep.join(paths)}
            self.ranks = PlainRanks(NUM_RANKS, threads=1, env=environment, timeout_s=timeout_s)

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        if self._real_time:
            self._hurry()
        results = self.ranks.submit(function, *arguments)
        self._signal(signal.SIGSTOP)
        return results

    def _hurry(self) -> None:
        """Let no other process of the machine delay a rank that wakes up: the same for all sides."""
        for pid in self.ranks.pids:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.ranks.pids:
            os.kill(pid, number)

    def prepare(self, kinds: list[Kind], times: Times) -> dict[Kind, list[list[str]]]:
        """Build the schedules and return their orders: torch's GPipe and 1F1B are code without one, and the same as ours."""
        orders = self._submit(prepare, self.is_ours, self._backend, kinds, times)[0]
        return {kind: rows or our_order(kind) for kind, rows in orders.items()}

    def run(self, kind: Kind, count: int) -> list[dict[str, Any]]:
        """Take `count` timed steps behind the lead-in, and return the figures of each."""
        ranks = self._submit(run_block, kind, self.steps_taken[kind], count + LEAD_IN)
        self.steps_taken[kind] += count + LEAD_IN
        ends = [max(step["end_s"] for step in steps) for steps in zip(*ranks, strict=True)]
        return [
            figures(step_s=ends[place] - ends[place - 1], ranks=[steps[place] for steps in ranks])
            for place in range(LEAD_IN, count + LEAD_IN)
        ]

    def __enter__(self) -> Gang:
        self.ranks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if not self.ranks.is_closed:
            self._signal(signal.SIGCONT)
        self.ranks.__exit__(*exception)


def our_order(kind: Kind) -> list[list[str]]:
    schedule = PipelineSchedule.build(
        kind, num_ranks=NUM_RANKS, num_micro_batches=NUM_MICRO_BATCHES, virtual=VIRTUAL[kind]
    )
    return [[str(action) for action in row] for row in schedule.actions]


def figures(step_s: float, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a step's idle share, mean sleeps, and what was slept in which order."""
    slept = [rank["slept"] for rank in ranks]
    asleep = [sum(seconds for *_, seconds in row) for row in slept]
    each = {phase: [s for row in slept for _, p, s in row if p == phase] for phase in "FIW"}
    return {
        "step_s": step_s,
        "idle": 1.0 - statistics.fmean(asleep) / step_s,
        "idle_of_ranks": [1.0 - seconds / step_s for seconds in asleep],
        "sleep_s": {phase: statistics.fmean(values) for phase, values in each.items()},
        "cpu_s": statistics.fmean(rank["cpu_s"] for rank in ranks),
        "loss": next(rank["loss"] for rank in ranks if rank["loss"] is not None),
        "order": [[f"{block}{phase}" for block, phase, _ in row] for row in slept],
    }


def expected(text: str, kind: Kind, *, is_ours: bool) -> list[str]:
    """Return what an action sleeps through, in any order: torch runs all of stage 0's backward as its W."""
    action = Action.parse(text)
    phases = {"F": "F", "B": "IW", "I": "I", "W": "W"}[action.kind]
    if not is_ours and action.stage == 0:
        phases = {"I": "", "W": "IW"}.get(action.kind, phases)
    blocks = [place - 1 for place in deal(kind)[action.stage] if place > 0]
    return sorted(f"{block}{phase}" for block in blocks for phase in phases)


def check_order(step: dict[str, Any], rows: list[list[str]], kind: Kind, *, is_ours: bool) -> None:
    """Refuse a step whose sleeps did not happen where the schedule has them."""
    for rank, (row, codes) in enumerate(zip(rows, step["order"], strict=True)):
        place = 0
        for text in row:
            wanted = expected(text, kind, is_ours=is_ours)
            found = sorted(codes[place : place + len(wanted)])
            if found != wanted:
                raise RuntimeError(f"{kind}, rank {rank}: {text} was to sleep through {wanted}, and slept {found}")
            place += len(wanted)
        if place != len(codes):
            raise RuntimeError(f"{kind}, rank {rank}: slept {len(codes) - place} times too often")


def simulated(kind: Kind, rows: list[list[str]], sleep_s: dict[str, float], *, is_ours: bool) -> float:
    """Return the idle share of the same order of work, if nothing took time but the sleeps."""
    schedule = PipelineSchedule(
        # The kind decides which stage lies on which rank, and that is checked; halves are allowed in all.
        kind=kind,
        num_ranks=NUM_RANKS,
        num_micro_batches=NUM_MICRO_BATCHES,
        virtual=VIRTUAL[kind],
        actions=rows,  # pyright: ignore[reportArgumentType] - it parses text
    )

    def cost(action: Action) -> float:
        return sum(sleep_s[code[-1]] for code in expected(str(action), kind, is_ours=is_ours))

    return schedule.simulate(cost).bubble_fraction


def run_rounds(gangs: list[Gang], kinds: list[Kind], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Let every side take its block of every schedule in turn, so many times."""
    by_name = {gang.name: gang for gang in gangs}
    pids = [os.getpid()] + [pid for gang in gangs for pid in gang.ranks.pids]
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        for kind in order_of(number, kinds):
            before = busy_s(pids)
            blocks = {name: by_name[name].run(kind, steps) for name in order_of(number, list(by_name))}
            wall, others = (after - then for after, then in zip(busy_s(pids), before, strict=True))
            found.append({"round": number, "kind": kind, "others_cores": others / wall, "blocks": blocks})
    return found


def busy_s(pids: list[int]) -> tuple[float, float]:
    """Return the time, and what everything but these processes has computed until now [core seconds]."""
    times = psutil.cpu_times()
    own = [psutil.Process(pid).cpu_times() for pid in pids]
    busy = times.user + times.nice + times.system + times.irq + times.softirq
    return time.perf_counter(), busy - sum(used.user + used.system for used in own)


def idle_of(block: list[dict[str, Any]]) -> float:
    return statistics.median(step["idle"] for step in block)


def summarise(
    kind: Kind, orders: dict[str, dict[Kind, list[list[str]]]], rounds: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return each side's median idle share with quartiles of the blocks, its simulation, and our distance to torch."""
    rounds = [entry for entry in rounds if entry["kind"] == kind]
    rows: dict[str, Any] = {}
    for name in rounds[0]["blocks"]:
        is_ours = name.startswith("ours")
        blocks = [entry["blocks"][name] for entry in rounds]
        steps = [step for block in blocks for step in block]
        sleep_s = {phase: statistics.fmean(step["sleep_s"][phase] for step in steps) for phase in "FIW"}
        idle = quartiles(idle_of(block) for block in blocks)
        on_paper = simulated(kind, orders[name][kind], sleep_s, is_ours=is_ours)
        rows[name] = {
            "idle": idle,
            "simulated": on_paper,
            "sleep_s": sleep_s,
            "step_s": statistics.median(step["step_s"] for step in steps),
            "cpu_s": statistics.median(step["cpu_s"] for step in steps),
        }
        if is_ours:
            rows[name] |= {"above": idle[1] - on_paper, "met": idle[1] - on_paper <= BOUND}
    for name, row in rows.items():
        if name != "torch" and "torch" in rows:
            row["minus_torch"] = quartiles(
                idle_of(entry["blocks"][name]) - idle_of(entry["blocks"]["torch"]) for entry in rounds
            )
    others = statistics.fmean(entry["others_cores"] for entry in rounds)
    return {"rows": rows, "theirs": THEIRS[kind], "others_cores": others}


def print_summary(kind: Kind, summary: dict[str, Any]) -> None:
    for name, row in summary["rows"].items():
        low, median, high = row["idle"]
        text = f"{kind:12s} {name:10s} idle {median:6.1%} [{low:.1%}, {high:.1%}]  simulated {row['simulated']:6.1%}"
        text += f"  step {row['step_s'] * 1e3:6.1f} ms  processor {row['cpu_s'] * 1e3:5.1f} ms a rank"
        if "above" in row:
            text += f"  above {row['above']:+6.1%} {'met' if row['met'] else 'MISSED'}"
        if "minus_torch" in row:
            low, median, high = row["minus_torch"]
            text += f"  minus torch {median:+6.1%} [{low:+.1%}, {high:+.1%}]"
        print(text)
    print(f"{kind:12s} all else on the machine {summary['others_cores']:.2f} cores", flush=True)


def losses_agree(gangs_losses: dict[str, list[float]]) -> bool:
    """Tell whether all sides train the same model the same way."""
    first = next(iter(gangs_losses.values()))
    return all(
        abs(a - b) <= LOSS_TOLERANCE * abs(a)
        for losses in gangs_losses.values()
        for a, b in zip(first, losses, strict=True)
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(VIRTUAL), default=list(VIRTUAL))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--sleep-ms", nargs=3, type=float, default=[10.0, 10.0, 10.0], metavar=("F", "I", "W"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--real-time", action="store_true", help="real-time priority for all ranks; needs the right to it"
    )
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for one call, and one exchange")
    parser.add_argument("--limit-s", type=int, default=900, help="for everything")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def give_up(number: int, frame: Any) -> None:
    raise TimeoutError("the benchmark did not end within --limit-s")


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(arguments.limit_s)
    times = Times(*(value / 1e3 for value in arguments.sleep_ms))
    with contextlib.ExitStack() as stack:
        gangs, orders, agree = [], {}, True
        for name in arguments.sides:
            gang = stack.enter_context(Gang(name, arguments.timeout_s, real_time=arguments.real_time))
            orders[name] = gang.prepare(arguments.kinds, times)
            gangs.append(gang)
        for kind in arguments.kinds:
            warm = {gang.name: gang.run(kind, WARM_UP) for gang in gangs}
            for gang in gangs:
                check_order(warm[gang.name][-1], orders[gang.name][kind], kind, is_ours=gang.is_ours)
            agree = agree and losses_agree({name: [step["loss"] for step in steps] for name, steps in warm.items()})
        rounds = run_rounds(gangs, arguments.kinds, arguments.rounds, arguments.steps)
    for entry in rounds:  # checked once; all steps' orders would be most of the file
        for block in entry["blocks"].values():
            for step in block:
                del step["order"]
    summaries = {kind: summarise(kind, orders, rounds) for kind in arguments.kinds}
    for kind, summary in summaries.items():
        print_summary(kind, summary)
    if {"1f1b", "zbv"} <= set(summaries):
        for name in arguments.sides:
            ratio = summaries["zbv"]["rows"][name]["idle"][1] / summaries["1f1b"]["rows"][name]["idle"][1]
            print(f"{name:10s} zbv idles {ratio:.2f} of 1f1b's time{' MISSED' if ratio >= ZBV_TO_1F1B else ''}")
    print("losses agree" if agree else "LOSSES DIFFER")
    if arguments.out:
        options = {**vars(arguments), "out": None, "blocks": NUM_BLOCKS}
        record = {"options": options, "bound": BOUND, "environment": environment(), "orders": orders}
        record |= {"losses_agree": agree, "results": summaries, "rounds": rounds}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record) + "\n")
    signal.alarm(0)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
