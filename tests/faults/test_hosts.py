"""F20: two hosts with two ranks each: one process's numbers, memory shared inside a host alone, and a rank that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.faults.hosts import can_make_hosts, network
from tests.faults.shm_ranks import Zygote

COUNT = 2
IMPORTS = ("torch._dynamo", "meshwright.testing", "meshwright.run.applying")
"""What ranks need that compare a plan: an optimizer imports the first one when it is made."""


@pytest.mark.long
@pytest.mark.root
@pytest.mark.skipif(not can_make_hosts(), reason="needs the right to make namespaces, and ip, unshare and nsenter")
def test_a_plan_over_two_hosts_and_a_rank_that_is_killed_on_the_other(zygote: Zygote) -> None:
    with network() as hosts:
        job = {"MASTER_ADDR": hosts.hosts[0].address, "MASTER_PORT": "29519"}
        plans = {"plan": "dp=2,tp=2,zero=1", "endless": "dp=2,pp=2,micro_batches=2"}
        args = {"firsts": [host.pid for host in hosts.hosts], **plans, "variables": job}
        with zygote.ranks("be_on_host", 2 * COUNT, imports=IMPORTS, **args) as ranks:
            assert ranks.hear_all("equal") == [True] * 4, ranks.lines
            assert ranks.hear_all("tp") == [[0, 1], [0, 1], [2, 3], [2, 3]]
            for rank in range(2 * COUNT):
                assert ranks.hear(rank, "segments") >= 1
                assert not ranks.hear(rank, "world_shares_memory")
                for members, shares in ranks.hear(rank, "groups"):
                    assert shares == (len({member // COUNT for member in members}) == 1), ranks.lines
            ranks.hear_all("trains")
            for pid in hosts.hosts[1].processes():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "rank3":
                    os.kill(pid, signal.SIGKILL)
            assert ranks.hear_all("error", [0, 1, 2]) == ["LostPeerError"] * 3, ranks.lines
            assert ranks.hear_all("peer", [0, 1, 2]) == [3] * 3, ranks.lines
            assert "rank 3 on host1 has ended without a word" in ranks.hear(0, "text")
            assert ranks.hear_all("exit") == [12, 12, 12, signal.SIGKILL]
        assert [host.left() for host in hosts.hosts] == [{}, {}]
