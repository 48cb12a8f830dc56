"""F20: two hosts with two ranks each: one process's numbers, memory shared inside a host alone, and a rank that is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.faults.hosts import Network, can_make_hosts, network

ROOT = Path(__file__).resolve().parents[2]
COUNT = 2
LIMIT_S = 100.0


class Lines:
    """JSON lines of the processes that start a host's ranks."""

    def __init__(self, hosts: Network, plan: str) -> None:
        variables = {"MASTER_ADDR": hosts.hosts[0].address, "MASTER_PORT": "29519", "OMP_NUM_THREADS": "1"}
        words = ["-P", "-m", "tests.faults.jobs.host_ranks", "forked"]
        found = {**variables, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        self.processes = [
            host.start([sys.executable, *words, str(index), str(COUNT), plan], found, ROOT)
            for index, host in enumerate(hosts.hosts)
        ]
        self._texts = [b"", b""]
        self._open = [0, 1]
        self._until = time.monotonic() + LIMIT_S

    def read(self, key: str, num_lines: int = 2 * COUNT) -> list[dict[str, Any]]:
        """Return the lines of ranks that have a key, as soon as there are so many."""
        while len(found := [line for line in self._lines() if key in line]) < num_lines:
            assert self._open, self._texts
            streams = {self.processes[index].stdout: index for index in self._open}
            ready = select.select(list(streams), [], [], max(0.0, self._until - time.monotonic()))[0]
            assert ready, self._texts
            for stream in ready:
                part = os.read(stream.fileno(), 1 << 16)
                self._texts[streams[stream]] += part
                if not part:
                    self._open.remove(streams[stream])
        return sorted(found, key=lambda line: line["rank"])

    def _lines(self) -> list[dict[str, Any]]:
        whole = [line for text in self._texts for line in text.split(b"\n")[:-1]]
        return [json.loads(line) for line in whole if line.startswith(b'{"')]

    def codes(self) -> list[int]:
        found = [process.wait(max(0.1, self._until - time.monotonic())) for process in self.processes]
        for process in self.processes:
            process.stdout.close()
        return found


@pytest.mark.root
@pytest.mark.skipif(not can_make_hosts(), reason="needs the right to make namespaces, and ip, unshare and nsenter")
def test_a_plan_over_two_hosts_and_a_rank_that_is_killed_on_the_other() -> None:
    with network() as hosts:
        lines = Lines(hosts, "dp=2,tp=2,zero=1")
        compared = lines.read("equal")
        assert [line["equal"] for line in compared] == [True] * 4, compared
        assert [line["tp"] for line in compared] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        for line in lines.read("groups"):
            assert line["segments"] >= 1
            assert not line["world_shares_memory"]
            for ranks, shares in line["groups"]:
                assert shares == (len({rank // COUNT for rank in ranks}) == 1), line
        lines.read("trains")
        for pid in hosts.hosts[1].processes():
            if Path(f"/proc/{pid}/comm").read_text().strip() == "rank3":
                os.kill(pid, signal.SIGKILL)
        lost = lines.read("error", 3)
        assert [(line["rank"], line["error"], line["peer"]) for line in lost] == [
            (rank, "LostPeerError", 3) for rank in range(3)
        ], lost
        assert "rank 3 on host1 has ended without a word" in lost[0]["text"]
        assert lines.codes() == [12, 12]
        assert [host.left() for host in hosts.hosts] == [{}, {}]
