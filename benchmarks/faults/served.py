"""Events on two hosts that stay: their ranks are forked, with a job's variables, by a process that has imported torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.events import LOSS
from benchmarks.faults.jobs import LIMIT_S, fatal_lines, harm_job, lose_for_a_while, num_steps, write_config
from benchmarks.hosts.two_hosts import COUNT, PORT, RANKS, ROOT
from tests.faults.hosts import Host, Network, network


class Servers:
    """The process of each host that forks ranks."""

    def __init__(self, hosts: Network) -> None:
        self.hosts = hosts
        words = [sys.executable, "-P", "-m", RANKS, "serve"]
        found = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._processes = [
            host.start([*words, str(index), str(COUNT)], found, ROOT, stdin=subprocess.PIPE)
            for index, host in enumerate(hosts.hosts)
        ]
        self._texts = [b"" for _ in self._processes]
        self._pids = [set(host.processes()) for host in hosts.hosts]
        self.hear("ready", [None, None], LIMIT_S)
        self._pids = [set(host.processes()) for host in hosts.hosts]

    def begin(self, request: dict[str, Any]) -> None:
        """Have both hosts start their ranks."""
        for process in self._processes:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()

    def hear(self, key: str, found: list[Any], limit_s: float, at: list[float | None] | None = None) -> bool:
        """Wait for a line with a key from each host; return whether they came in time."""
        until = time.monotonic() + limit_s
        while None in found and time.monotonic() < until:
            waiting = {self._processes[i].stdout: i for i, value in enumerate(found) if value is None}
            for stream in select.select(list(waiting), [], [], 0.05)[0]:
                index = waiting[stream]
                self._texts[index] += os.read(stream.fileno(), 1 << 16)
                *whole, self._texts[index] = self._texts[index].split(b"\n")
                for line in whole:
                    if line.startswith(b'{"') and key in (said := json.loads(line)):
                        found[index] = said[key]
                        if at is not None:
                            at[index] = time.monotonic()
        return None not in found

    def ranks(self) -> dict[int, int]:
        """Return the ranks that live: rank -> process."""
        found = {}
        for host, own in zip(self.hosts.hosts, self._pids, strict=True):
            for pid in set(host.processes()) - own:
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    if name.startswith("rank") and Path(f"/proc/{pid}/cmdline").read_bytes():  # else it has ended
                        found[int(name[4:])] = pid
        return found

    def left(self) -> dict[str, Any]:
        """Return what is left but the servers, two seconds after the end, and end it."""
        until = time.monotonic() + 2.0
        while (found := self._left_now()) and time.monotonic() < until:
            time.sleep(0.02)
        for host, own in zip(self.hosts.hosts, self._pids, strict=True):
            for pid in set(host.processes()) - own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return found

    def _left_now(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for host, own in zip(self.hosts.hosts, self._pids, strict=True):
            found |= _without(host, own)
        return found


def _without(host: Host, own: set[int]) -> dict[str, Any]:
    left = host.left()
    processes = {pid: command for pid, command in host.processes().items() if pid not in own}
    left = {name: what for name, what in left.items() if name != "processes"} | (
        {"processes": processes} if processes else {}
    )
    return {f"{host.name} {name}": what for name, what in left.items()}


@contextlib.contextmanager
def serving() -> Iterator[Servers]:
    """Make two hosts whose servers stay."""
    with network() as hosts:
        yield Servers(hosts)


def run_served(
    event: dict[str, Any], folder: Path, servers: Servers, *, timeout_s: float, warm_steps: int
) -> dict[str, Any]:
    """Train on both hosts until an event; return what came of it. Ranks that are stuck for good are ended at last."""
    write_config(folder, event["plan"], timeout_s)
    master = (
        {"MASTER_ADDR": servers.hosts.hosts[0].address, "MASTER_PORT": str(PORT)} if event["launcher"] == "env" else {}
    )
    request = {
        "folder": str(folder),
        "launcher": event["launcher"],
        "variables": master,
        "arguments": ["train", "c.toml"],
    }
    servers.begin(request)
    codes: list[Any] = [None, None]
    ended_at: list[float | None] = [None, None]
    row: dict[str, Any] = {}
    until = time.monotonic() + LIMIT_S
    while num_steps(folder) < warm_steps and time.monotonic() < until and None in codes:
        servers.hear("codes", codes, 0.05, ended_at)
    pids = servers.ranks()
    if num_steps(folder) < warm_steps or len(pids) != 2 * COUNT:
        row["trouble"] = f"no steps; codes {codes}, ranks {pids}"
    else:
        time.sleep(event["delay_s"])
        began = time.monotonic()
        if event["kind"] == LOSS:
            row["steps_meanwhile"] = lose_for_a_while(servers.hosts, event, folder)
            began = time.monotonic()
            os.kill(pids[event["rank"]], signal.SIGTERM)
        elif event["kind"].startswith("wire "):
            servers.hosts.cut(event["rank"] // COUNT, event["kind"].removeprefix("wire "))
        else:
            harm_job(event["kind"], event["rank"], folder, pids)
        row["in_time"] = _await_ends(event, servers, codes, ended_at, pids, limit_s=timeout_s + 40.0)
        row["seconds"] = [None if at is None else round(at - began, 3) for at in ended_at]
    row["left"] = servers.left()
    servers.hear("codes", codes, 10.0, ended_at)
    servers.hosts.mend(event["rank"] // COUNT)
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("output-*"))]
    (folder / "output").write_text("\n".join(texts))
    lines = [dict(line, of=of) for of, text in enumerate(texts) for line in fatal_lines(text)]
    return row | {"codes": [code for each in codes for code in each or []], "fatal": lines}


def _await_ends(
    event: dict[str, Any],
    servers: Servers,
    codes: list[Any],
    ended_at: list[float | None],
    pids: dict[int, int],
    *,
    limit_s: float,
) -> bool:
    """Wait for the end of all ranks; one that stands still for good is ended when the others are gone, as srun would."""
    until = time.monotonic() + limit_s
    is_stuck = event["kind"] in ("SIGSTOP", "hold the interpreter")
    while None in codes and time.monotonic() < until:
        servers.hear("codes", codes, 0.1, ended_at)
        if is_stuck and set(servers.ranks()) == {event["rank"]}:
            os.kill(pids[event["rank"]], signal.SIGKILL)
            is_stuck = False
    return None not in codes
