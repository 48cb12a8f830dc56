"""Our `distributed` against DDP, Accelerate, DeepSpeed and one plain process: same model, same data, in turn in one run.

    python benchmarks/data_parallel/peers_bench.py --out benchmarks/data_parallel/results/NAME.json

Every side has processes of its own (`gangs.py`), all alive at once; a round lets each compute a block of steps, in an
order that changes from round to round. A block's figure is the median of its steps; ratios are taken round by round. The
rounds are split over several starts, since how memory comes to lie in a process is drawn once for its life.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from bench import CASES
from gangs import LEAD_IN, Gang
from peers import KEEP_FREED_MEMORY, PEERS, Side, ours
from rounds import OTHERS_LIMIT, run_rounds, wait_for_quiet
from sharded_peers import DTENSOR, FSDP2, ZERO_REDUNDANCY, deepspeed

HERE = Path(__file__).resolve().parent
NUM_SHARES = 2


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to train: our preset, and the libraries that do the same."""

    preset: str
    peers: tuple[Side, ...]
    bounds: dict[str, float]
    """What our step may take at most, as a ratio to the fastest other library's."""


ZERO_2_BOUNDS = {"latency-bound": 0.70, "balanced": 0.93, "bandwidth-bound": 0.55}
KINDS = {
    "distributed": Kind(
        "distributed",
        tuple(PEERS.values()),
        {"latency-bound": 0.82, "balanced": 0.96, "bandwidth-bound": 0.70},
    ),
    "zero1": Kind("zero1", (ZERO_REDUNDANCY, deepspeed(1)), ZERO_2_BOUNDS),
    "zero2": Kind("zero2", (ZERO_REDUNDANCY, deepspeed(2)), ZERO_2_BOUNDS),
    "zero3": Kind("zero3", (FSDP2, deepspeed(3)), {"latency-bound": 0.45, "balanced": 0.82, "bandwidth-bound": 0.45}),
    "tensor": Kind("tensor", (DTENSOR,), {"latency-bound": 0.30, "balanced": 0.65, "bandwidth-bound": 0.52}),
    "tensor-whole-sequence": Kind("tensor,sequence_parallel=off", (DTENSOR,), {}),
}
BOUND_TO_ONE_PROCESS = {"balanced": 1.0}
CHECKED_STEPS = 10
"""Losses of these first steps must agree; later ones drift apart by rounding, which training makes grow [count]."""
LOSS_TOLERANCE = 1e-5
IDLE_LIMIT = 0.01
"""What a waiting process may take of a core: beyond it the sides would not have been alone."""


def quartiles(values: Iterable[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    values = list(values)
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def run_start(case: str, sides: list[Side], arguments: argparse.Namespace) -> dict[str, Any]:
    """Start all sides and take this start's share of the rounds."""
    patience_s = arguments.patience_s / arguments.starts
    patience_s -= wait_for_quiet(patience_s)
    with contextlib.ExitStack() as stack:
        gangs: dict[str, Gang] = {}
        facts = {}
        for side in sides:
            limits = {"timeout_s": arguments.timeout_s, "freeze": not arguments.no_freeze}
            gang = Gang(side, case, arguments.optimizer, NUM_SHARES, **limits)
            gangs[side.name] = stack.enter_context(gang)
            facts[side.name] = gang.prepare()
        for gang in gangs.values():
            gang.run(arguments.warmup)
        for gang in gangs.values():  # how the others started is not what is asked about
            gang.idle = {"wall_s": 0.0, "cpu_s": 0.0}
        rounds = run_rounds(
            gangs,
            rounds=math.ceil(arguments.rounds / arguments.starts),
            steps=arguments.steps,
            patience_s=patience_s,
        )
        return {
            "sides": facts,
            "rounds": rounds,
            "losses": {name: gang.losses for name, gang in gangs.items()},
            "idle_cores": {name: gang.idle["cpu_s"] / max(gang.idle["wall_s"], 1e-9) for name, gang in gangs.items()},
        }


def loss_difference(starts: list[dict[str, Any]], mine: str, other: str, count: int | None = None) -> float:
    """Return the greatest relative difference of two sides' losses, over all starts and the first `count` steps."""
    return max(
        abs(my_loss - their_loss) / abs(their_loss)
        for start in starts
        for my_loss, their_loss in zip(start["losses"][mine][:count], start["losses"][other][:count], strict=True)
    )


def summarise(case: str, kind: Kind, starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one case, from its raw samples."""
    rounds = [entry for start in starts for entry in start["rounds"]]
    counted = [entry for entry in rounds if entry["counts"]]
    figures = {name: [entry["blocks"][name]["step_s"] for entry in counted] for name in starts[0]["sides"]}
    subject = next(name for name in figures if name.startswith("ours"))  # the first of --ours: the bounds are for it
    libraries = [name for name in figures if not name.startswith("ours") and name != "one-process"]
    best = min(libraries, key=lambda name: statistics.median(figures[name]), default=None)
    rows = {}
    for name, times in figures.items():
        row: dict[str, Any] = {"step_ms": [1e3 * value for value in quartiles(times)]}
        row["page_faults_per_step"] = statistics.median(
            entry["blocks"][name]["page_faults_per_step"] for entry in counted
        )
        if name != subject:
            row["ratio"] = quartiles(mine / other for mine, other in zip(figures[subject], times, strict=True))
            row["loss_difference"] = loss_difference(starts, subject, name, CHECKED_STEPS)
            row["loss_difference_at_end"] = loss_difference(starts, subject, name)
            bound = kind.bounds.get(case) if name == best else None
            if name == "one-process":
                bound = BOUND_TO_ONE_PROCESS.get(case)
            if bound is not None:
                row |= {"bound": bound, "met": row["ratio"][1] <= bound}
        rows[name] = row
    differences = [row["loss_difference"] for row in rows.values() if "loss_difference" in row]
    return {
        "subject": subject,
        "best": best,
        "rows": rows,
        "losses_agree": max(differences, default=0.0) <= LOSS_TOLERANCE,
        "idle_cores": max(share for start in starts for share in start["idle_cores"].values()),
        "others_cores": statistics.fmean(entry["others_cores"] for entry in counted),
        "num_counted": len(counted),
        "num_disturbed": len(rounds) - len(counted),
    }


def print_summary(case: str, summary: dict[str, Any]) -> None:
    for name, row in summary["rows"].items():
        low, median, high = row["step_ms"]
        text = (
            f"{case:16s} {name:12s} {median:8.1f} ms [{low:.1f}, {high:.1f}]  faults {row['page_faults_per_step']:6.0f}"
        )
        if "ratio" in row:
            low, median, high = row["ratio"]
            text += f"  ours/side {median:.3f} [{low:.3f}, {high:.3f}]  loss {row['loss_difference']:.0e}"
        if name == summary["best"]:
            text += "  best"
        if "bound" in row:
            text += f"  bound {row['bound']:.2f} {'met' if row['met'] else 'MISSED'}"
        print(text)
    idle, others = summary["idle_cores"], summary["others_cores"]
    notes = [
        f"{summary['num_counted']} rounds, {summary['num_disturbed']} more disturbed",
        f"a waiting process took {idle:.4f} of a core{': TOO MUCH' if idle > IDLE_LIMIT else ''}",
        f"all else on the machine {others:.2f}{': NOT ALONE, measure again' if others > OTHERS_LIMIT else ''}",
    ]
    if not summary["losses_agree"]:
        notes.append("LOSSES DIFFER")
    print(f"{case:16s} {'; '.join(notes)}", flush=True)


def environment() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False, timeout=30
    )
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--kind", choices=list(KINDS), default="distributed")
    parser.add_argument("--peers", nargs="*", default=None, help="names; default: all of the kind")
    parser.add_argument("--ours", nargs="+", choices=["shm", "gloo"], default=["shm"], help="bounds are for the first")
    parser.add_argument("--optimizer", choices=["adamw", "adamw-fused", "sgd"], default="adamw")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--starts", type=int, default=4, help="the rounds are split over so many fresh starts")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=CHECKED_STEPS)
    parser.add_argument("--keep-freed-memory", action="store_true", help="give the other sides our allocator settings")
    parser.add_argument("--no-freeze", action="store_true", help="do not stop the processes of waiting sides")
    parser.add_argument("--patience-s", type=float, default=300.0, help="for waiting and disturbed rounds, per case")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one exchange, a block, and a side's start")
    parser.add_argument("--limit-s", type=int, default=3600, help="for everything")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.warmup + LEAD_IN < CHECKED_STEPS:
        parser.error(f"--warmup must be at least {CHECKED_STEPS - LEAD_IN}: {CHECKED_STEPS} losses are checked")
    return arguments


def give_up(number: int, frame: Any) -> None:
    raise TimeoutError("the benchmark did not end within --limit-s")


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(arguments.limit_s)
    kind = KINDS[arguments.kind]
    peers = [side for side in kind.peers if arguments.peers is None or side.name in arguments.peers]
    if arguments.keep_freed_memory:
        peers = [dataclasses.replace(side, environment=(*side.environment, *KEEP_FREED_MEMORY)) for side in peers]
    sides = [ours(transport, kind.preset) for transport in arguments.ours] + peers
    record: dict[str, Any] = {
        "options": {**vars(arguments), "out": None},
        "bounds": {"best": kind.bounds, "one-process": BOUND_TO_ONE_PROCESS},
        "environment": environment(),
        "results": {},
    }
    passed = True
    for case in arguments.cases:
        starts = [run_start(case, sides, arguments) for _ in range(arguments.starts)]
        summary = summarise(case, kind, starts)
        print_summary(case, summary)
        record["results"][case] = {"summary": summary, "starts": starts}
        passed = passed and summary["losses_agree"] and summary["idle_cores"] <= IDLE_LIMIT
        if arguments.out:  # after every case: an interrupted run keeps what it has
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(record) + "\n")
    signal.alarm(0)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
