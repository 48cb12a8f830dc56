"""Runs of `meshwright train` as a job: under torchrun on this host, or on two hosts; and what happens to their ranks."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.events import LOSS, LOSS_S
from benchmarks.hosts.two_hosts import COUNT, start
from tests.faults import leaks
from tests.faults.hosts import Network
from tests.faults.killer import is_rank
from tests.faults.test_joined import free_port

from meshwright.host import is_running

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0
PLAIN = "benchmarks.faults.plain_ddp"
CONFIG = """
model = {{ target = "tests.faults.jobs.harmed:{build}" }}
data = {{ source = "tests.faults.jobs.harmed:data", prefetch = 0, num_workers = {workers} }}
optimizer = {{ lr = 0.001 }}

[train]
steps = 1000000
global_batch_size = 8
loss = "cross_entropy"
name = "run"
plan = "{plan}"
timeout_s = {timeout_s}
print_every = 0
"""
FATAL = re.compile(r"^FATAL run=\S+ rank=(\w+) step=(\d+) phase=(\w+) cause=(.*)$", re.MULTILINE)


def write_config(folder: Path, plan: str, timeout_s: float, *, workers: int = 0) -> None:
    """Write c.toml; only data parallel plans take a model that does harm in its forward: others look at its code."""
    build = "build" if plan.startswith("dp=") and "," not in plan else "build_plain"
    text = CONFIG.format(build=build, workers=workers, plan=plan, timeout_s=timeout_s)
    (folder / "c.toml").write_text(text)


def num_steps(folder: Path) -> int:
    """Return how many steps a run has told of."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / "runs" / "run" / "events.jsonl").read_text(errors="replace").count('"event": "step"')
    return 0


def fatal_lines(text: str) -> list[dict[str, Any]]:
    """Return what lines for machines say: the rank, and the cause."""
    return [{"rank": rank, "cause": cause[:300]} for rank, _, _, cause in FATAL.findall(text)]


class Output:
    """What processes say, read as it comes, and when each of them ends."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self.texts = [b""] * len(processes)
        self.ended_at: list[float | None] = [None] * len(processes)

    def read_until(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Read until something is so or all have ended; return whether that was in time."""
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for index, process in enumerate(self._processes):
                if process.stdout is not None and self.ended_at[index] is None:
                    selector.register(process.stdout, selectors.EVENT_READ, index)
            while not is_done() and time.monotonic() < deadline:
                for key, _ in selector.select(0.02):
                    part = os.read(key.fd, 1 << 16)
                    self.texts[key.data] += part
                    if not part:
                        selector.unregister(key.fileobj)
                self._note_ends()
                if all(self.ended_at):
                    return True
        return is_done()

    def _note_ends(self) -> None:
        for index, process in enumerate(self._processes):
            if self.ended_at[index] is None and process.poll() is not None:
                self.ended_at[index] = time.monotonic()

    def finish(self) -> None:
        """Read what is left."""
        for index, process in enumerate(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.texts[index] += process.communicate(timeout=5)[0] or b""


class Ends:
    """When the last of some processes ends, as it is seen by looking."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.last: float | None = None

    def look(self) -> bool:
        """Look; return False, since nothing is over with it."""
        if self.last is None and not any(is_running(pid) for pid in self._pids):
            self.last = time.monotonic()
        return False


def rank_pids(pids: list[int]) -> dict[int, int]:
    """Return which of these processes are ranks of a job: rank -> process."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            place = [v.partition(b"=")[2] for v in variables if v.startswith((b"RANK=", b"SLURM_PROCID="))]
            if place and b"train" in words and {b"meshwright", PLAIN.encode()} & set(words):
                found.setdefault(int(place[0]), pid)
    return found


def launched_pids(watch: leaks.Watch, num_ranks: int) -> dict[int, int]:
    """Return the processes of ranks that `meshwright train` has started: rank -> process."""
    commands = {pid: command.strip() for pid, command in watch.processes().items()}
    return {
        rank: pid for rank in range(num_ranks) for pid, command in commands.items() if is_rank(rank, num_ranks)(command)
    }


def agents(pids: list[int]) -> list[int]:
    """Return which of these processes are agents of torchrun."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def harm_job(kind: str, rank: int, folder: Path, pids: dict[int, int]) -> None:
    """Do what an event is: a signal from outside, or what the rank finds in its file."""
    if kind.startswith("SIG"):
        os.kill(pids[rank], signal.Signals[kind])
    else:
        place = "forward" if kind.startswith("forward ") else "data"
        draft = folder / f"draft-{rank}"
        draft.write_text(f"{place} {kind.removeprefix('forward ')}")
        draft.rename(folder / f"harm-{rank}")


def run_job(
    event: dict[str, Any], folder: Path, hosts: Network | None, *, timeout_s: float, warm_steps: int
) -> dict[str, Any]:
    """Train until an event; return what came of it.

    Args:
        event: "launcher", "plan", "kind", "rank"; "module" is what the ranks run, `meshwright` where it is left out.
        folder: An empty folder.
        hosts: Two hosts, or None: torchrun on this one.
        timeout_s: How long an exchange may wait [s].
        warm_steps: Steps before the event [count].
    """
    write_config(folder, event["plan"], timeout_s)
    watch = leaks.Watch()
    os.environ[leaks.MARK_VARIABLE] = watch.mark
    words, module = ["train", "c.toml"], event.get("module", "meshwright")
    if hosts is None:
        command = [sys.executable, "-P", "-m"]
        if event["launcher"] == "torchrun":
            ranks = ["--nproc-per-node", str(event["ranks"]), "--master-port", str(free_port())]
            command += ["torch.distributed.run", *ranks, "-m"]
        command += [module, *words]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes = [subprocess.Popen(command, cwd=folder, env=variables, **streams)]
    else:
        processes = start(hosts, event["launcher"], module, words, folder)
    output = Output(processes)
    row: dict[str, Any] = {}
    try:
        if not output.read_until(lambda: num_steps(folder) >= warm_steps, LIMIT_S) or all(output.ended_at):
            row["trouble"] = "no steps"
            return row
        everyone = [pid for host in hosts.hosts for pid in host.processes()] if hosts else list(watch.processes())
        pids = rank_pids(everyone) if event["launcher"] != "own" else launched_pids(watch, event["ranks"])
        time.sleep(event.get("delay_s", 0.0))
        if event["kind"] == LOSS and hosts is not None:
            row["steps_meanwhile"] = lose_for_a_while(hosts, event, folder)
        began = time.monotonic()
        if event["kind"] == LOSS:
            os.kill(pids[event["rank"]], signal.SIGTERM)
        elif event["kind"].startswith("launcher "):
            os.kill(processes[0].pid, signal.Signals[event["kind"].removeprefix("launcher ")])
        else:
            _begin(event, folder, hosts, pids, everyone)
        ends = Ends([pid for rank, pid in pids.items() if rank != event["rank"]])
        in_time = output.read_until(ends.look, LIMIT_S + timeout_s)
        ends.look()
        row["ranks_seconds"] = None if ends.last is None else round(ends.last - began, 3)
        row["seconds"] = [None if at is None else round(at - began, 3) for at in output.ended_at]
        row["in_time"] = in_time
    finally:
        for process in processes if not all(output.ended_at) else ():
            process.kill()
        # Ranks whose agent is gone save, and end by themselves.
        row |= _what_is_left(hosts, watch, 10.0 if event["kind"].startswith("agent") else 2.0)
        output.finish()
        text = "\n".join(part.decode(errors="replace") for part in output.texts)
        row |= {"codes": [process.returncode for process in processes], "fatal": fatal_lines(text)}
        (folder / "output").write_text(text)
    return row


def lose_for_a_while(hosts: Network, event: dict[str, Any], folder: Path) -> int:
    """Lose packets of a host for some seconds; return how many steps the run has taken meanwhile."""
    before = num_steps(folder)
    hosts.cut(event["rank"] // COUNT, "loss")
    time.sleep(LOSS_S)
    after = num_steps(folder)
    hosts.mend(event["rank"] // COUNT)
    return after - before


def _begin(
    event: dict[str, Any], folder: Path, hosts: Network | None, pids: dict[int, int], everyone: list[int]
) -> None:
    kind = event["kind"]
    if hosts is not None and kind.startswith("wire "):
        hosts.cut(event["rank"] // COUNT, kind.removeprefix("wire "))
    elif kind.startswith("agent "):
        found = sorted(agents(list(hosts.hosts[event["rank"] // COUNT].processes()) if hosts else everyone))
        os.kill(found[0], signal.Signals[kind.removeprefix("agent ")])
    else:
        harm_job(kind, event["rank"], folder, pids)


def _what_is_left(hosts: Network | None, watch: leaks.Watch, patience_s: float) -> dict[str, Any]:
    """Return what is left some time after the end."""
    until = time.monotonic() + patience_s

    def look() -> dict[str, Any]:
        if hosts is None:
            return {"processes": watch.processes()} if watch.processes() else {}
        found: dict[str, Any] = {}
        for host in hosts.hosts:
            found |= {f"{host.name} {name}": what for name, what in host.left().items()}
        return found

    while (left := look()) and time.monotonic() < until:
        time.sleep(0.02)
    return {"left": left}
