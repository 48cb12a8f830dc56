"""Groups over shared memory in the life of a process: joined by user code, made, destroyed, made again, forked, left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.faults.command import Command
from tests.faults.shm_ranks import Zygote
from tests.faults.test_joined import CLEAN
from tests.faults.test_shm_killed import AT_ONCE_S

PROGRAM = """
import json, os, torch, torch.distributed as dist
import meshwright as mw
mw.register_shm()
mw.register_shm()
dist.init_process_group("shm")
part = dist.new_group([0, 1], backend="shm")
total = torch.full((100000,), dist.get_rank() + 1.0)
dist.all_reduce(total)
dist.all_reduce(total, group=part)
names = [group._get_backend(torch.device("cpu")).name() for group in (dist.group.WORLD, part)]
os.write(1, json.dumps({"backends": names, "sum": total[-1].item()}).encode() + b"\\n")
"""


def test_a_program_of_ones_own_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    logs = tmp_path / "logs"
    options = ["--nproc-per-node", "2", "--redirects", "2", "--log-dir", str(logs)]
    with Command(["-m", "torch.distributed.run", *options, str(path)]) as command:
        # Nobody destroys the groups: the programs end with them alive, and without a word.
        assert command.finish() == 0
    said = [path.read_text() for path in logs.rglob("stderr.log")]
    assert len(said) == 2
    assert not any("Traceback" in text for text in said), said
    assert command.lines == [{"backends": ["shm", "shm"], "sum": 6.0}] * 2


def test_groups_that_come_and_go(zygote: Zygote) -> None:
    with zygote.ranks("come_and_go", 3, times=3) as ranks:
        assert ranks.hear_all("exit") == [0] * 3
        for rank in range(3):
            assert ranks.said(rank, "backend") == ["shm"] * 3, ranks.lines
            assert ranks.said(rank, "right") == [True] * 9, ranks.lines


def test_groups_leave_nothing_in_the_process(zygote: Zygote) -> None:
    with zygote.ranks("make_many_groups", 2, count=40) as ranks:
        for rank in range(2):
            before, after = ranks.hear(rank, "held"), ranks.hear(rank, "held", 2)
            assert before["files"] == after["files"]
            assert before["threads"] == after["threads"]
            assert before["segments"] == after["segments"] == 1
            # Not one for each group; malloc and the threads' stacks that are kept for the next ones take a few.
            assert after["mappings"] - before["mappings"] < 20, (before, after)


def test_groups_that_are_left_and_destroyed_at_once(zygote: Zygote) -> None:
    # The one that leaves held a bare pointer to a group, whose last owner is the other one.
    with zygote.ranks("leave_beside_a_thread", 2, count=40) as ranks:
        assert ranks.hear_all("exit") == [0, 0], (ranks.lines, ranks.errors(0), ranks.errors(1))
        assert ranks.hear_all("destroyed") == [40, 40]


@pytest.mark.parametrize("how", ["exit", "return", "destroy", "use", "multiprocessing"])
def test_a_child_that_a_rank_forks(zygote: Zygote, how: str) -> None:
    with zygote.ranks("fork", 2, how=how) as ranks:
        assert ranks.hear_all("exit") == [0, 0], (ranks.lines, ranks.errors(0))
        assert ranks.said(0, "child") == [0], ranks.lines
        assert ranks.hear_all("right") == [[True, True]] * 2
        used = ranks.said(0, "used")
        assert len(used) == (3 if how == "use" else 0)
        assert all(f"forked from rank 0 (process {ranks.pid(0)})" in each["text"] for each in used), used


@pytest.mark.parametrize("what", ["recv", "callback"])
def test_a_program_that_ends_while_something_is_in_flight(zygote: Zygote, what: str) -> None:
    with zygote.ranks("end_in_flight", 2, what=what, finalizes=True) as ranks:
        ranks.hear(1, "ready")
        assert ranks.hear(0, "exit") == 0, ranks.errors(0)
        assert ranks.errors(0) == ""
        ranks.signal(1, signal.SIGUSR1)
        name = f"rank 0 (process {ranks.pid(0)})"
        first, again = ranks.hear(1, "first"), ranks.hear(1, "again")
        assert name in first["text"]
        assert name in again["text"]
        assert again["at"] - first["began"] < 1.0


def test_a_group_that_is_destroyed_ends_what_is_in_flight(zygote: Zygote) -> None:
    with zygote.ranks("destroy_in_flight", 2) as ranks:
        ranks.hear(0, "ended", 10)
        for each in ranks.said(0, "ended"):
            assert each["kind"] == "PeerGoneError", each
            assert "this rank has left the group" in each["text"], each
            assert each["at"] - each["began"] < AT_ONCE_S


def test_a_receive_from_anybody_outlives_a_rank_that_has_left(zygote: Zygote) -> None:
    with zygote.ranks("receive_from_anybody", 3) as ranks:
        ranks.hear(2, "ready")
        ranks.hear(1, "left")
        ranks.hear(0, "entering")
        ranks.await_sleep([0])
        ranks.await_naps(0, 3)
        ranks.signal(2, signal.SIGUSR1)
        assert ranks.hear(0, "received") == [1, 2]
        # With the last one gone there is nothing more to come.
        assert "has left the group" in ranks.hear(0, "first")["text"]
