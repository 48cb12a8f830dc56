"""Ranks that something else started: torchrun, srun, Kubernetes, nobody; and F16, a port that is taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.faults.command import Command
from tests.faults.shm_ranks import Zygote

PROGRAM = """
import json, os, sys, time
import torch
from meshwright.ranks.join import join_world
from meshwright.errors import exit_code_of
import meshwright.ranks.join
def say(**line):
    sys.stdout.write(json.dumps(line) + "\\n")  # in one piece: torchrun's ranks share the stream
    sys.stdout.flush()
for environment in json.loads(sys.argv[3]) if len(sys.argv) > 3 else []:
    os.environ.update(environment)
    start = time.monotonic()
    try:
        join_world(join_timeout_s=float(sys.argv[2]))
    except Exception as error:
        say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - start, code=exit_code_of(error))
    for name in environment:
        del os.environ[name]
start = time.monotonic()
try:
    limit = {"timeout_s": float(os.environ["LIMIT_S"])} if "LIMIT_S" in os.environ else {}
    world = join_world(join_timeout_s=float(sys.argv[2]), **limit)
    assert join_world() is world
    with world.sharing_failures():
        total = torch.full((2,), world.rank + 1.0)
        world.default_group.all_reduce(total)
        say(rank=world.rank, size=world.world_size, sum=total.tolist(), local=world.local_rank,
            distributed=torch.distributed.is_initialized(), launched=world.is_launched)
        if sys.argv[1] == f"raise {world.rank}":
            raise ValueError("mine")
        if sys.argv[1] == f"die {world.rank}":
            os.kill(os.getpid(), 9)
        if sys.argv[1].startswith("stop"):
            until = time.monotonic() + 20
            while not world.watch._neighbours.knows(1 - world.rank):
                if time.monotonic() > until:
                    raise TimeoutError("the other rank's process was not found")
                time.sleep(0.01)
            world.default_group.barrier()
        if sys.argv[1] == f"stop {world.rank}":
            os.kill(os.getpid(), 19)
        with world.calls.during("step"):
            world.default_group.barrier()
except Exception as error:
    say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - start, peer=getattr(error, "peer", None))
    sys.exit(exit_code_of(error))
"""

CLEAN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def env_of(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run_ranks(
    zygote: Zygote, program: str, how: str, environments: list[dict[str, str]], timeout_s: float = 20
) -> list[tuple[int, list[dict[str, Any]]]]:
    """Run the program once with each environment; return each one's exit code and the lines that it printed.

    In processes that are forked with torch imported: seconds less for each of them, and what they see of the world is the same.
    """
    args = {"path": program, "arguments": [how, str(timeout_s)], "environments": environments, "without": CLEAN}
    with zygote.ranks("run_program", len(environments), finalizes=True, **args) as ranks:
        codes = ranks.hear_all("exit")
        texts = [(ranks.place / f"output-{rank}").read_text() for rank in range(len(environments))]
    return [(code, [json.loads(line) for line in text.splitlines()]) for code, text in zip(codes, texts, strict=True)]


# What is set, and what is then missing.
PARTIAL = (
    ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT are missing"),
    ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT are missing"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT is missing"),
    ({"SLURM_PROCID": "0"}, "SLURM_NTASKS, SLURM_LOCALID are missing"),
)


def test_a_partial_environment_lists_what_is_missing_and_nothing_set_is_a_world_of_one(program: str) -> None:
    # In one process, which may join when it has corrected what was wrong: each more imports torch.
    with Command([program, "ok", "5", json.dumps([environment for environment, _ in PARTIAL])]) as command:
        assert command.finish() == 0
    *refused, line = command.lines
    for (_, missing), refusal in zip(PARTIAL, refused, strict=True):
        assert (refusal["error"], refusal["code"]) == ("ConfigError", 2)
        assert missing in refusal["text"]
        assert refusal["seconds"] < 2.0
    assert (line["size"], line["sum"], line["distributed"], line["launched"]) == (1, [1.0, 1.0], False, False)


def test_torchrun(program: str) -> None:
    with Command(["-m", "torch.distributed.run", "--nproc-per-node", "2", program, "ok", "20"]) as command:
        assert command.finish() == 0
    lines = sorted(command.lines, key=lambda line: line["rank"])
    assert [(line["rank"], line["size"], line["local"], line["sum"]) for line in lines] == [
        (0, 2, 0, [3.0, 3.0]),
        (1, 2, 1, [3.0, 3.0]),
    ]


def test_the_variables_of_kubernetes(program: str) -> None:
    # As interpreters of their own, from their start to their end.
    port = free_port()
    commands = [Command([program, "ok", "20"], env_of(rank, 2, port)) for rank in (0, 1)]
    assert [command.finish() for command in commands] == [0, 0]
    assert [command.lines[0]["sum"] for command in commands] == [[3.0, 3.0]] * 2


def test_the_variables_of_srun(zygote: Zygote, program: str) -> None:
    common = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": str(free_port() - 15000 + 16000)}
    environments = [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    done = run_ranks(zygote, program, "ok", environments)
    assert [code for code, _ in done] == [0, 0], done
    assert [lines[0]["local"] for _, lines in done] == [0, 1]


@pytest.mark.parametrize("guilty", [0, 1])
def test_the_guilty_ranks_error_reaches_the_others(zygote: Zygote, program: str, guilty: int) -> None:
    port = free_port()
    done = run_ranks(zygote, program, f"raise {guilty}", [env_of(rank, 2, port) for rank in (0, 1)])
    last = [lines[-1] for _, lines in done]
    assert last[guilty]["error"] == "ValueError"
    assert last[1 - guilty]["error"] == "LostPeerError"
    assert f"rank {guilty} of 2 raised ValueError: mine" in last[1 - guilty]["text"]
    assert done[guilty][0] == 10
    assert done[1 - guilty][0] == 12


def test_a_rank_that_was_killed_is_the_peer_in_the_others_error(zygote: Zygote, program: str) -> None:
    port = free_port()
    (code, lines), _ = run_ranks(zygote, program, "die 1", [env_of(rank, 2, port) for rank in (0, 1)])
    assert code == 12
    assert (lines[-1]["error"], lines[-1]["peer"]) == ("LostPeerError", 1), lines


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_stopped_rank_with_the_store_is_named_and_ended_by_its_host(
    zygote: Zygote, program: str, transport: str
) -> None:
    # The store of a stopped process takes questions and answers none: whoever waits over gloo asks it again and again.
    port, own = free_port(), {"MESHWRIGHT_TRANSPORT": transport, "LIMIT_S": "1", "LOCAL_WORLD_SIZE": "2"}
    (stopped, _), (code, lines) = run_ranks(
        zygote, program, "stop 0", [env_of(rank, 2, port) | own | {"LOCAL_RANK": str(rank)} for rank in (0, 1)]
    )
    assert (stopped, code) == (-signal.SIGKILL, 12), lines
    assert (lines[-1]["error"], lines[-1]["peer"]) == ("LostPeerError", 0), lines
    assert "the job's store, on rank 0's host, has not answered for" in lines[-1]["text"]


def test_ranks_of_one_host_meet_on_loopback_whatever_the_masters_address_is(zygote: Zygote, program: str) -> None:
    # As where a node's name means its address in the network: there nobody listens.
    port = free_port()
    own = {"MASTER_ADDR": "127.0.0.2", "LOCAL_WORLD_SIZE": "2"}
    done = run_ranks(zygote, program, "ok", [env_of(rank, 2, port) | own for rank in (0, 1)], timeout_s=5)
    assert [code for code, _ in done] == [0, 0], done


def test_a_taken_port_names_its_holder(zygote: Zygote, program: str) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        ((code, (line, *_)),) = run_ranks(zygote, program, "ok", [env_of(0, 2, holder.getsockname()[1])])
    assert code == 2
    assert line["error"] == "ConfigError"
    assert f"held by process {os.getpid()} (" in line["text"]
    assert Path(psutil.Process().cmdline()[0]).name in line["text"]
    assert "export MASTER_PORT=" in line["text"]
    assert line["seconds"] < 2.0


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_never_come_are_named_in_time(zygote: Zygote, program: str, rank: int) -> None:
    port = free_port()
    start = time.monotonic()
    ((code, (line, *_)),) = run_ranks(zygote, program, "ok", [env_of(rank, 2, port)], timeout_s=1.5)
    assert code == 12
    assert time.monotonic() - start < 20
    assert line["error"] == "LostPeerError"
    expected = "rank 1 did not come" if rank == 0 else f"could not reach the master at 127.0.0.1:{port}"
    assert expected in line["text"]
    assert line["seconds"] < 5.0


def test_a_group_that_the_caller_made_is_used(program: str, tmp_path: Path) -> None:
    text = f"""
import json, torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
from meshwright.ranks.join import join_world
world = join_world()
print(json.dumps({{"same": world.default_group.process_group is dist.group.WORLD, "size": world.world_size}}))
dist.destroy_process_group()
"""
    path = tmp_path / "own.py"
    path.write_text(text)
    with Command([str(path)]) as command:
        assert command.finish() == 0, sys.stderr
    assert command.lines == [{"same": True, "size": 1}]
