"""Plans on two hosts of one machine, two ranks each: every kind of plan beside one process, in float64; needs root.

python -m benchmarks.hosts.two_hosts --out benchmarks/hosts/results/plans.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from tests.faults.hosts import Network, can_make_hosts, network  # noqa: E402

from surroundings import environment  # noqa: E402

COUNT = 2
"""Ranks of a host [count]."""
PORT = 29517
LIMIT_S = 500.0
RANKS = "tests.faults.jobs.host_ranks"
LAUNCHERS = ("torchrun", "env", "srun")
PLANS = (
    "dp=4",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "dp=4,zero=3",
    "dp=4,zero=3,shard=2",
    "dp=4,compress=int8",
    "dp=2,tp=2",
    "dp=2,tp=2,zero=2",
    "dp=2,tp=2,zero=3",
    "tp=4",
    "pp=4,micro_batches=4",
    "dp=2,pp=2,micro_batches=3,schedule=zb-h1",
    "dp=2,pp=2,micro_batches=2,zero=1",
    "tp=2,pp=2,micro_batches=2",
    "tp=2,pp=2,micro_batches=2,schedule=zbv",
)


def command(launcher: str, index: int, module: str, arguments: Sequence[str], address: str) -> list[str]:
    """Return the command that starts the ranks of one of two hosts."""
    python = [sys.executable, "-P"]
    if launcher == "torchrun":
        words = ["--nnodes", "2", "--node-rank", str(index), "--nproc-per-node", str(COUNT)]
        words += ["--master-addr", address, "--master-port", str(PORT)]
        return [*python, "-m", "torch.distributed.run", *words, "-m", module, *arguments]
    return [*python, "-m", RANKS, "start", str(index), str(COUNT), launcher, "-P", "-m", module, *arguments]


def variables(launcher: str, address: str) -> dict[str, str]:
    """Return what a job of that kind sets on every host."""
    found = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if launcher == "env":
        found |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    return found


def start(hosts: Network, launcher: str, module: str, arguments: Sequence[str], cwd: Path) -> list[Any]:
    """Start the ranks of both hosts; return the process that starts them on each."""
    address = hosts.hosts[0].address
    return [
        host.start(command(launcher, index, module, arguments, address), variables(launcher, address), cwd)
        for index, host in enumerate(hosts.hosts)
    ]


def lines_of(text: bytes) -> Iterator[dict[str, Any]]:
    for line in text.decode(errors="replace").splitlines():
        if line.startswith('{"'):
            yield json.loads(line)


def compare_plans(launcher: str, plans: Sequence[str]) -> dict[str, Any]:
    """Train under plans on four ranks of two hosts; return what each rank found."""
    with network() as hosts:
        before = [host.sent_bytes() for host in hosts.hosts]
        processes = start(hosts, launcher, RANKS, ["plans", *plans], ROOT)
        try:
            texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
            texts = [process.communicate()[0] for process in processes]
        sent = [host.sent_bytes() - was for host, was in zip(hosts.hosts, before, strict=True)]
        left = [host.left() for host in hosts.hosts]
    found = [line for text in texts for line in lines_of(text)]
    codes = [process.returncode for process in processes]
    rows = sorted((row for row in found if "plan" in row), key=lambda row: (row["plan"], row["rank"]))
    groups = sorted((row for row in found if "groups" in row), key=lambda row: row["rank"])
    result = {"launcher": launcher, "exit_codes": codes, "sent_bytes": sent, "left": left, "rows": rows}
    result["groups"] = groups
    result["problems"] = problems(result, plans)
    if any(codes) or result["problems"]:
        sys.stderr.write(b"\n".join(texts).decode(errors="replace")[-6000:])
    return result


def problems(result: dict[str, Any], plans: Sequence[str]) -> list[str]:
    """Return what is not as it must be."""
    found = []
    for plan in plans:
        equal = [row["rank"] for row in result["rows"] if row["plan"] == plan and row["equal"]]
        if equal != list(range(2 * COUNT)):
            found.append(f"{plan}: equal on ranks {equal}")
    for row in result["groups"]:
        for ranks, shares in row["groups"]:
            if shares != (len({rank // COUNT for rank in ranks}) == 1):
                found.append(f"ranks {ranks} share memory: {shares}")
    for row in result["rows"]:
        if len(row["tp"]) == COUNT and len({rank // COUNT for rank in row["tp"]}) > 1:
            found.append(f"{row['plan']}: tp lies over ranks {row['tp']}")
    if len(result["groups"]) != 2 * COUNT:
        found.append(f"{len(result['groups'])} ranks came to their end")
    return found + [f"left on host {index}: {left}" for index, left in enumerate(result["left"]) if left]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not can_make_hosts():
        parser.error("only root makes hosts, with `ip`, `unshare` and `nsenter`")
    record: dict[str, Any] = {"environment": environment(), "launchers": {}}
    for launcher in arguments.launchers:
        result = compare_plans(launcher, arguments.plans)
        record["launchers"][launcher] = result
        equal = sum(row["equal"] for row in result["rows"])
        print(launcher, f"{equal} of {len(result['rows'])} rows equal", result["problems"], flush=True)
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result["problems"] for result in record["launchers"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
