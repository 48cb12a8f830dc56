"""Ours against every library that trains on the CPU: same model, same data, in turn in one run.

    python benchmarks/peers/bench.py --all --rounds 20 --out DIR          every kind and case; DIR/KIND.json
    python benchmarks/peers/bench.py --kind pipeline --out FILE.json      one kind
    python benchmarks/peers/bench.py --all --base CHECKOUT --out DIR      this commit against another
    python benchmarks/peers/bench.py --table DIR_OR_FILE...               the README's tables, from results

Every side has processes of its own (`gangs.py`), all alive at once; a round lets each compute a block of steps, in an
order that changes from round to round. A block's figure is the median of its steps; ratios are taken round by round. The
rounds are split over several starts, since how memory comes to lie in a process is drawn once for its life.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from cases import CASES
from gangs import LEAD_IN
from kinds import BOUND_TO_BASE, BOUND_TO_ONE_PROCESS, KINDS
from measure import run_start
from summary import CHECKED_STEPS, IDLE_LIMIT, print_summary, summarise
from table import print_tables

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from surroundings import environment  # noqa: E402

ALL_KINDS = tuple(name for name in KINDS if name != "tensor-whole-sequence")  # that one is a variant of ours
OUR_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


class LimitReached(BaseException):
    """The time for everything is over. Not an Exception: a side must not be named as the one that failed."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="every kind, both our transports; --out is a folder")
    what.add_argument("--kind", choices=list(KINDS), default="distributed")
    what.add_argument("--table", nargs="+", type=Path, help="measure nothing; print tables of these results")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--peers", nargs="*", default=None, help="names; default: all of the kind")
    parser.add_argument(
        "--base", type=Path, help="a checkout of another commit, compared with this one instead of peers"
    )
    parser.add_argument("--ours", nargs="+", choices=["shm", "gloo"], help="ratios are of the first; default: shm")
    parser.add_argument("--schedules", nargs="+", choices=OUR_SCHEDULES, help="of our pipeline; default: 1f1b")
    parser.add_argument("--settings", help="more of our plan, for example bucket_bytes=4MiB")
    parser.add_argument("--optimizer", choices=["adamw", "adamw-fused", "sgd"], default="adamw")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--starts", type=int, default=4, help="the rounds are split over so many fresh starts")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=CHECKED_STEPS)
    parser.add_argument("--keep-freed-memory", action="store_true", help="give the other sides our allocator settings")
    parser.add_argument("--no-freeze", action="store_true", help="do not stop the processes of waiting sides")
    parser.add_argument("--patience-s", type=float, default=300.0, help="for waiting and disturbed rounds, per case")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one exchange, a block, and a side's start")
    parser.add_argument("--limit-s", type=int, default=3600, help="for all cases of one kind")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    arguments.ours = arguments.ours or (["shm", "gloo"] if arguments.all else ["shm"])
    if arguments.warmup + LEAD_IN < CHECKED_STEPS:
        parser.error(f"--warmup must be at least {CHECKED_STEPS - LEAD_IN}: {CHECKED_STEPS} losses are checked")
    return arguments


def give_up(number: int, frame: Any) -> None:
    raise LimitReached("the benchmark did not end within --limit-s")


def run_kind(name: str, arguments: argparse.Namespace, out: Path | None) -> bool:
    """Measure all cases of a kind; return whether the losses agree, the waiting sides kept still, and ours ran."""
    kind = KINDS[name]
    if arguments.base is not None:
        kind = dataclasses.replace(kind, bounds=BOUND_TO_BASE, gloo_bounds=BOUND_TO_BASE)
    options = {key: value for key, value in vars(arguments).items() if key not in ("all", "table")}
    record: dict[str, Any] = {
        "options": options | {"kind": name, "out": None, "base": arguments.base and commit_of(arguments.base)},
        "bounds": {"best": kind.bounds, "gloo": kind.gloo_bounds, "one-process": BOUND_TO_ONE_PROCESS},
        "environment": environment(),
        "results": {},
        "failed": {},
    }
    passed = True
    signal.alarm(arguments.limit_s)
    for case in arguments.cases:
        print(f"{name}, {case}", flush=True)
        try:
            starts = [run_start(case, kind.sides(arguments), arguments) for _ in range(arguments.starts)]
            summary = summarise(case, kind, starts)
        except (Exception, LimitReached) as error:  # of one case: the others may still be measured
            traceback.print_exc()
            record["failed"][case] = str(error)
            passed = False
            if isinstance(error, LimitReached):
                break
            continue
        print_summary(case, summary)
        record["results"][case] = {"summary": summary, "starts": starts}
        passed = passed and is_sound(summary)
        if out:  # after every case: an interrupted run keeps what it has
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record) + "\n")
    signal.alarm(0)
    return passed


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, in short."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def is_sound(summary: dict[str, Any]) -> bool:
    ours_ran = not any(side.startswith("ours") for side in summary["unavailable"])
    return summary["losses_agree"] and summary["idle_cores"] <= IDLE_LIMIT and ours_ran


def main() -> int:
    arguments = parse()
    if arguments.table:
        print_tables(arguments.table)
        return 0
    signal.signal(signal.SIGALRM, give_up)
    if not arguments.all:
        return 0 if run_kind(arguments.kind, arguments, arguments.out) else 1
    outcomes = [run_kind(name, arguments, arguments.out and arguments.out / f"{name}.json") for name in ALL_KINDS]
    if arguments.out:
        print_tables([arguments.out])
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
