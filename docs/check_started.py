"""Scripts of the pages that another program starts: two hosts by torchrun, and what the migration pages begin with.

    python docs/check_started.py

The losses of two hosts (here two agents of one machine) are those that the page shows. A script for another library is run where
that library is installed; it must end without an error. `make docs-check` runs this.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOSTS = ROOT / "examples" / "tutorials" / "hosts.py"
PAGE = ROOT / "docs" / "tutorials" / "hosts.md"
OTHERS = ROOT / "examples" / "howto" / "migrate"
TORCHRUN = ("torch.distributed.run",)
STARTED_BY = {
    "accelerate": ("accelerate.commands.launch", "--num_processes", "2", "--cpu", "--num_machines", "1"),
    "fsdp2": (*TORCHRUN, "--standalone", "--nproc-per-node", "2"),
    "lightning": (),
}
"""How each other library's script is started here; DeepSpeed's launcher wants a GPU or a compiler."""
NEEDS = {"accelerate": "accelerate", "fsdp2": "torch", "lightning": "lightning_fabric"}
TIMEOUT_S = 240


def started(words: tuple[str, ...], script: Path) -> subprocess.Popen[str]:
    """Return a script's process, started by a module or by itself."""
    command = [sys.executable, *(("-m", *words) if words else ()), str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    """Return what a process prints until it ends; leave with its output where it fails."""
    try:
        out, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}:\n{out}")
    return out


def losses(text: str) -> str:
    """Return the losses in a text."""
    found = re.search(r"losses over \d+ ranks: ([\d. ]+)", text)
    if found is None:
        raise SystemExit(f"no losses in:\n{text}")
    return found[1].strip()


def check_two_hosts() -> None:
    """Compare the losses of two agents of torchrun with those of the page."""
    common = ("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "29517")
    agents = [started((*TORCHRUN, *common, "--node-rank", str(rank)), HOSTS) for rank in range(2)]
    printed = [output_of(agent) for agent in agents]
    if losses("".join(printed)) != losses(PAGE.read_text()):
        raise SystemExit(f"two hosts: {printed}, and {PAGE.name} shows {losses(PAGE.read_text())}")
    sys.stdout.write("two agents of torchrun: the page's losses\n")


def main() -> None:
    """Run all of them."""
    check_two_hosts()
    for name, words in STARTED_BY.items():
        if importlib.util.find_spec(NEEDS[name]) is None:
            sys.stdout.write(f"{name}: not installed, not run\n")
            continue
        last = output_of(started(words, OTHERS / f"{name}_before.py")).strip().splitlines()[-1]
        sys.stdout.write(f"{name}: {last}\n")


if __name__ == "__main__":
    main()
