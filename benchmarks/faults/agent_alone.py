"""Seconds from `kill -9` of a rank under torchrun to the end of the last rank, and of torchrun: ours beside plain DDP, in turns.

python -m benchmarks.faults.agent_alone --rounds 20 --out benchmarks/faults/results/agent_alone.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.faults.jobs import PLAIN, run_job  # noqa: E402
from tests.faults.hosts import network  # noqa: E402

from surroundings import environment  # noqa: E402

SIDES = {"meshwright": "meshwright", "plain": PLAIN}
WARM_STEPS = 25
TIMEOUT_S = 60.0


def run_one(side: str, num_hosts: int, seed: int) -> dict[str, Any]:
    """Kill a rank of one run; return when what ended after that [s]."""
    source = random.Random(seed)
    plan = "dp=4" if num_hosts > 1 else source.choice(("dp=2", "dp=3"))
    num_ranks = int(plan[-1])
    event = {"launcher": "torchrun", "plan": plan, "ranks": num_ranks, "kind": "SIGKILL", "module": SIDES[side]}
    event |= {"rank": source.randrange(num_ranks), "delay_s": source.uniform(0.0, 0.5)}
    with tempfile.TemporaryDirectory(prefix="agent-") as name:
        given = {"timeout_s": TIMEOUT_S, "warm_steps": WARM_STEPS}
        if num_hosts == 1:
            row = run_job(event, Path(name), None, **given)
        else:
            with network() as hosts:
                row = run_job(event, Path(name), hosts, **given)
    if "trouble" in row:
        return {"trouble": row["trouble"]}
    return {"plan": plan, "rank": event["rank"], "ranks_s": row["ranks_seconds"], "all_s": max(row["seconds"])}


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each side and number of hosts."""
    lines = []
    for num_hosts, side in sorted({(row["hosts"], row["side"]) for row in rows}):
        chosen = [row for row in rows if (row["hosts"], row["side"]) == (num_hosts, side) and "all_s" in row]
        if chosen:
            figures = [sorted(row[name] for row in chosen) for name in ("ranks_s", "all_s")]
            shown = "; ".join(f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in figures)
            lines.append(f"{num_hosts} host(s), {side}, {len(chosen)} kills: last rank, torchrun: {shown} s")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, nargs="+", choices=(1, 2), default=(1, 2))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.rounds):
        for num_hosts in arguments.hosts:
            for side in SIDES if seed % 2 else reversed(SIDES):
                rows.append({"side": side, "hosts": num_hosts, "seed": seed} | run_one(side, num_hosts, seed))
                print(rows[-1], flush=True)
    lines = summary(rows)
    print("\n".join(lines))
    if arguments.out is not None:
        record = {"environment": environment(), "summary": lines, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if any("trouble" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
