"""Faults of every kind, under launch, `meshwright train`, torchrun and on two hosts: is the rank named, how soon, what is left?

    sudo python -m benchmarks.faults.campaign --count 1000 --entries launch command --out benchmarks/faults/results/campaign.jsonl

A line of the file is an event. Events that the file has are not run again, so that a campaign that was stopped goes on. A case is
its entry and its seed: `--entries launch --first-seed 7 --count 1` repeats the eighth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.faults import events, in_process, jobs  # noqa: E402
from benchmarks.faults.campaign_table import GROUPS, brief, group_of, judge, table  # noqa: E402
from benchmarks.faults.served import Servers, run_served, serving  # noqa: E402
from tests.faults.hosts import network  # noqa: E402

from surroundings import environment  # noqa: E402

ENTRIES = ("launch", "command", "own", "torchrun", "hosts")


def run_one(event: dict[str, Any], servers: Servers | None) -> dict[str, Any]:
    """Run one event; return it with what came of it."""
    folder = Path(tempfile.mkdtemp(prefix="event-"))
    began = time.monotonic()
    try:
        if event["entry"] in ("launch", "command"):
            row = in_process.run_in_process(event, folder)
        else:
            given = {"timeout_s": events.limit_s(event["kind"]), "warm_steps": 25}
            if event["entry"] in ("own", "torchrun"):
                row = jobs.run_job(event, folder, None, **given)
            elif event["launcher"] != "torchrun" and servers is not None:
                row = run_served(event, folder, servers, **given)
            else:
                with network() as hosts:
                    row = jobs.run_job(event, folder, hosts, **given)
    finally:
        output = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
    whole = event | row | {"took_s": round(time.monotonic() - began, 2), "load": round(os.getloadavg()[0], 1)}
    whole["wrong"] = judge(whole)
    if whole["wrong"]:
        whole["output"] = output[-3000:]
    return whole


def known_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the rows of files: of each event the last one, since defects are mended between two runs."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            row = json.loads(line)
            if "entry" in row:
                found[row["entry"], row["seed"]] = row
    return list(found.values())


def summarise(paths: list[Path], summary: Path) -> int:
    """Write the table and all rows to one file; return 1 where something was wrong."""
    rows = known_rows(paths)
    for row in rows:
        row["wrong"] = judge(row)
    rows.sort(key=lambda row: (ENTRIES.index(row["entry"]), row["seed"]))
    found = table(rows)
    lines = ",\n".join(json.dumps(brief(row)) for row in rows)
    begins = [
        line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if "environment" in line[:20]
    ]
    head = json.dumps({"begun": [json.loads(line) for line in begins], "table": found.splitlines()}, indent=1)[:-2]
    summary.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    print(found)
    return 1 if any(row["wrong"] for row in rows) else 0


def prepare() -> None:
    """Start what ranks are forked from, once for all events."""
    from meshwright.ranks.processes import rank_environment
    from meshwright.testing import pool

    pool.keep_templates(rank_environment("", None, None), ("torch._dynamo", "meshwright.train.session"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=ENTRIES)
    parser.add_argument("--only", default="", help="only events whose kind has this text")
    parser.add_argument("--kind", default="", help="this event at each seed, in place of one that is drawn")
    parser.add_argument("--group", choices=GROUPS, help="only events of one row of the table")
    parser.add_argument("--without", nargs="*", default=(), help="launchers whose events are left out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no event after so long")
    parser.add_argument("--again", action="store_true", help="run what was wrong once more")
    parser.add_argument("--out", type=Path, required=True, help="a line for each event")
    parser.add_argument("--summary", type=Path, help="run nothing: print the table, and write it with all rows as JSON")
    parser.add_argument("--from", dest="sources", type=Path, nargs="*", default=(), help="further files of the summary")
    arguments = parser.parse_args()
    if arguments.summary is not None:
        return summarise([arguments.out, *arguments.sources], arguments.summary)
    known = {
        (row["entry"], row["seed"]) for row in known_rows([arguments.out]) if not (arguments.again and row["wrong"])
    }
    os.environ["OMP_NUM_THREADS"] = "1"
    # A shell has its background jobs ignore these, and whoever inherits that goes on ignoring them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if {"launch", "command"} & set(arguments.entries):
        prepare()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(arguments.out.open("a", encoding="utf-8"))
        words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        file.write(json.dumps({"environment": environment(), "command": words}) + "\n")
        has_served = "hosts" in arguments.entries and not {"env", "srun"} <= set(arguments.without)
        servers = stack.enter_context(serving()) if has_served else None
        return run_all(arguments, known, file, servers)


def run_all(arguments: argparse.Namespace, known: set[tuple[str, int]], file: TextIO, servers: Servers | None) -> int:
    """Run the events that are not known, and write a line for each; return the exit code."""
    began, num_wrong = time.monotonic(), 0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.count):
        for entry in arguments.entries:
            event = events.draw(seed, entry, arguments.kind)
            if (entry, seed) in known or arguments.only not in event["kind"]:
                continue
            if event["launcher"] in arguments.without or arguments.group not in (None, group_of(event["kind"])):
                continue
            if time.monotonic() - began > arguments.seconds:
                return 1 if num_wrong else 0
            row = run_one(event, servers)
            file.write(json.dumps(row) + "\n")
            file.flush()
            num_wrong += bool(row["wrong"])
            shown = f"{entry} {seed} {row['launcher']} {row['plan']} {row['kind']} rank {row['rank']}: {row.get('seconds')} s"
            print("WRONG" if row["wrong"] else "ok", shown, row["wrong"] or "", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
