"""Fuzz: draw programs, run them under their plans, count the verdicts.

python -m benchmarks.fuzz.run --count 300 --seed 1 --out benchmarks/fuzz/results/today.json
python -m benchmarks.fuzz.run --minutes 10 --plans dp,zero3,tp --workers 2
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.fuzz import engine, verdict  # noqa: E402
from benchmarks.fuzz.draw import PLAN_KINDS, draw  # noqa: E402
from benchmarks.fuzz.program import features  # noqa: E402

from surroundings import environment  # noqa: E402


def run_seed(seed: int, kinds: tuple[str, ...], timeout_s: float) -> dict[str, Any]:
    """Run the program of a seed and return its row."""
    program = draw(seed, kinds)
    found, seconds = engine.run_program(program, timeout_s)
    slow = found.kind == "hung"
    if slow:  # on a busy machine a search may take longer than that: it hangs where four times as long is too short
        found, more = engine.run_program(program, 4 * timeout_s)
        seconds += more
    row = {
        "seed": seed,
        "plan_kind": program["kind"],
        "plan": program["plan"],
        "verdict": found.kind,
        "detail": found.detail,
        "largest": found.largest,
        "cut": found.cut,
        "action": found.action,
        "seconds": round(seconds, 3),
        "slow": slow and found.kind != "hung",
        "features": features(program),
    }
    return row | {"program": program} if found.kind in verdict.BUGS else row


def line(row: dict[str, Any]) -> str:
    cut = "" if row["cut"] is None else f" cut {row['cut']:.0%}"
    detail = "" if row["verdict"] == "equal" else f"  {row['detail'][:150]}"
    return f"{row['verdict']:8s} {row['seed']:>9d} {row['plan']:44s} {row['seconds']:6.2f} s  {row['largest']:.1e}{cut}{detail}"


def shares(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the count of each verdict among the valid programs, and the share of those that are equal."""
    valid = [row for row in rows if row["verdict"] != "invalid"]
    counts = collections.Counter(row["verdict"] for row in valid)
    kinds = {kind: counts[kind] for kind in (*verdict.GOOD, *verdict.BUGS) if counts[kind]}
    return {"programs": len(valid), **kinds, "equal_fraction": round(counts["equal"] / max(1, len(valid)), 4)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_plan: dict[str, list[Any]] = collections.defaultdict(list)
    by_feature: dict[str, list[Any]] = collections.defaultdict(list)
    for row in rows:
        by_plan[row["plan_kind"]].append(row)
        for feature in row["features"]:
            by_feature[feature].append(row)
    equal = sorted(row["largest"] for row in rows if row["verdict"] == "equal")
    cuts = [row["cut"] for row in rows if row["cut"] is not None and row["verdict"] in ("equal", "whole")]
    return {
        "all": {**shares(rows), "invalid": sum(row["verdict"] == "invalid" for row in rows)},
        "by_plan_kind": {name: shares(by_plan[name]) for name in sorted(by_plan)},
        "by_feature": {name: shares(by_feature[name]) for name in sorted(by_feature)},
        "largest_difference_of_equal": {
            "median": equal[len(equal) // 2] if equal else None,
            "p99": equal[int(0.99 * (len(equal) - 1))] if equal else None,
            "max": equal[-1] if equal else None,
            "above_1e-11": sum(value > 1e-11 for value in equal),
        },
        "slower_than_the_timeout": sum(row["slow"] for row in rows),
        "mean_cut_fraction": sum(cuts) / len(cuts) if cuts else None,
        "programs_per_s": round(len(rows) / max(1e-9, sum(row["seconds"] for row in rows)), 3),
    }


def work(arguments: argparse.Namespace, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run this process's programs, one line each."""
    rows: list[dict[str, Any]] = []
    start, seed = time.monotonic(), arguments.seed
    while len(rows) < arguments.count and time.monotonic() - start < 60 * arguments.minutes:
        row = run_seed(seed, kinds, arguments.timeout)
        rows.append(row)
        seed += arguments.stride
        if arguments.lines:
            print(json.dumps(row), flush=True)
        elif not arguments.quiet or row["verdict"] in verdict.BUGS:
            print(line(row), flush=True)
    return rows


def spread(arguments: argparse.Namespace, workers: int) -> list[dict[str, Any]]:
    """Run the programs on several processes, each with ranks of its own."""
    rows: list[dict[str, Any]] = []
    command = [
        sys.executable,
        "-m",
        "benchmarks.fuzz.run",
        "--lines",
        "--stride",
        str(workers),
        "--plans",
        arguments.plans,
    ]
    command += ["--minutes", str(arguments.minutes), "--timeout", str(arguments.timeout)]
    processes = [
        subprocess.Popen(
            [*command, "--seed", str(arguments.seed + index), "--count", str(-(-arguments.count // workers))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index in range(workers)
    ]
    import selectors

    ready = selectors.DefaultSelector()
    for process in processes:
        ready.register(process.stdout, selectors.EVENT_READ)  # pyright: ignore[reportArgumentType]
    while ready.get_map():
        for key, _ in ready.select():
            text = key.fileobj.readline()  # pyright: ignore[reportAttributeAccessIssue]
            if not text:
                ready.unregister(key.fileobj)
                continue
            rows.append(json.loads(text))
            if not arguments.quiet or rows[-1]["verdict"] in verdict.BUGS:
                print(line(rows[-1]), flush=True)
    for process in processes:
        process.wait()
    return sorted(rows, key=lambda row: row["seed"])


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10**9, help="programs")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=None, help="first seed; default: the time of day")
    parser.add_argument("--plans", default=",".join(PLAN_KINDS), help=f"kinds of plan, of {', '.join(PLAN_KINDS)}")
    parser.add_argument("--timeout", type=float, default=20.0, help="how long a rank waits for another [s]")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--lines", action="store_true", help="one JSON object a line")
    parser.add_argument("--quiet", action="store_true", help="print only bugs")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.seed is None:
        arguments.seed = time.time_ns() // 1_000_000 % 10**9
    kinds = tuple(arguments.plans.split(","))
    rows = spread(arguments, arguments.workers) if arguments.workers > 1 else work(arguments, kinds)
    if arguments.lines:
        return 0
    found = summary(rows)
    if arguments.out is not None:
        kept = [row if row["verdict"] != "equal" else {k: v for k, v in row.items() if k != "detail"} for row in rows]
        record = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "environment": environment(),
            "command": sys.argv,
            "summary": found,
            "programs": kept,
        }
        arguments.out.write_text(json.dumps(record) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "by_feature"}, indent=1))
    return 1 if any(row["verdict"] in verdict.BUGS for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
