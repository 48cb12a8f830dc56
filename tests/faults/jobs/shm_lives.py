"""Jobs of ranks over the course of a process's life: joining, groups that come and go, forks, and the end of the interpreter."""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.faults.jobs.shm_jobs import (
    Me,
    accept_orders,
    attempt,
    attempt_others,
    await_order,
    die_with_parent,
    finish,
    join,
    say,
)

from meshwright.comm.shm.build import load_extension


def sum_is_right(me: Me, group: Any = None) -> bool:
    data = torch.full((1000,), float(me.rank + 1))
    dist.all_reduce(data, group=group)
    members = range(me.size) if group is None else dist.get_process_group_ranks(group)
    return bool((data == sum(rank + 1 for rank in members)).all())


def run_program(
    me: Me, path: str, arguments: list[str], environments: list[dict[str, str]], without: list[str]
) -> None:
    """Run a program of one's own as `python path arguments` would; what it prints goes to the file "output-RANK"."""
    output = os.open(Path(me.place, f"output-{me.rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.close(output)
    log = logging.getLogger("meshwright")  # as where nobody has set it up
    log.handlers.clear()
    log.setLevel(logging.NOTSET)
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(environments[me.rank])
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def fork(me: Me, how: str) -> None:
    """Rank 0 forks, as a loader of data does, after both of the backend's threads have started; the child ends in some way."""
    join(me)
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    received = torch.zeros(4)
    receipt = dist.irecv(received, 1 - me.rank)
    dist.isend(torch.ones(4), 1 - me.rank).wait()
    receipt.wait()
    if me.rank == 0:
        if how == "multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=int)
            child.start()
            child.join()
            say(child=child.exitcode)
        else:
            pid = os.fork()
            if pid == 0:
                die_with_parent()
                child_of_rank(me, how)
            say(waiting=pid)
            say(child=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    dist.barrier()
    say(right=[sum_is_right(me), sum_is_right(me)])
    dist.destroy_process_group()


def child_of_rank(me: Me, how: str) -> None:
    if how == "exit":
        os._exit(0)
    if how == "return":
        sys.exit(0)
    if how == "destroy":
        dist.destroy_process_group()
        os._exit(0)
    if how == "use":
        attempt("used", lambda: dist.all_reduce(torch.ones(1)))
        attempt("used", lambda: dist.all_reduce(torch.ones(1), async_op=True).wait())
        attempt("used", lambda: dist.send(torch.ones(1), 1))
        os._exit(0)
    raise ValueError(how)


def end_in_flight(me: Me, what: str) -> None:
    """Rank 0's program ends while something is in flight that its peer has not come to; nobody has destroyed the group."""
    join(me)
    dist.barrier()
    if me.rank == 1:
        accept_orders()
        await_order()
        attempt("first", lambda: dist.all_reduce(torch.ones(1)))
        attempt_others(0)
        os._exit(0)
    data = torch.ones(1 << 20)
    if what == "recv":
        global _kept
        _kept = dist.irecv(data, 1)
    else:
        work = dist.all_reduce(data, async_op=True)
        dist.all_reduce(data, async_op=True)
        if what == "callback":
            _kept = work.get_future().then(lambda done: time.monotonic())
    say(entering=True)


_kept: Any = None


def come_and_go(me: Me, times: int) -> None:
    """Join, make groups, use and destroy them, leave, and all of it again."""
    for time_ in range(times):
        say(backend=join(me, name=f"store-{time_}"))
        part = dist.new_group([0, 2], backend="shm")
        say(right=sum_is_right(me))
        say(right=me.rank == 1 or sum_is_right(me, part))
        if me.rank != 1:
            dist.destroy_process_group(part)
        say(right=sum_is_right(me))
        dist.destroy_process_group()


def used_group(me: Me) -> Any:
    """Return a new group of two ranks, both of whose threads have started."""
    part = dist.new_group([0, 1], backend="shm")
    dist.all_reduce(torch.ones(100_000), group=part, async_op=True).wait()
    receipt = dist.irecv(torch.ones(100_000), 1 - me.rank, group=part)
    dist.send(torch.ones(100_000), 1 - me.rank, group=part)
    receipt.wait()
    return part


def leave_beside_a_thread(me: Me, count: int) -> None:
    """Leave all groups, as at the program's end, while another thread destroys the same ones."""
    join(me)
    groups = [used_group(me) for _ in range(count)]
    dist.barrier()
    begins = threading.Barrier(2)

    def destroy() -> None:
        begins.wait()
        while groups:
            dist.destroy_process_group(groups.pop(0))

    thread = threading.Thread(target=destroy)
    thread.start()
    begins.wait()
    load_extension().leave_all()
    thread.join()
    say(destroyed=count - len(groups))


def make_many_groups(me: Me, count: int) -> None:
    join(me)
    for number in range(3 + count):
        part = used_group(me)
        dist.barrier()
        dist.destroy_process_group(part)
        del part
        if number in (2, 2 + count):
            say(held=what_is_held())
    dist.destroy_process_group()


def what_is_held() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": sum("memfd:meshwright" in line for line in maps),
        "mappings": len(maps),
    }


def destroy_in_flight(me: Me) -> None:
    """Rank 0 destroys the group while its peer has come to nothing of what is in flight."""
    join(me)
    dist.barrier()
    if me.rank == 1:
        signal.pause()
    works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(3)]
    works += [dist.irecv(torch.ones(4), 1), dist.isend(torch.ones(1 << 20), 1)]
    futures = [work.get_future() for work in works]
    dist.destroy_process_group()
    for each in [*futures[::-1], *works[::-1]]:
        attempt("ended", each.wait)


def receive_from_anybody(me: Me) -> None:
    """Rank 1 sends and leaves; rank 2 sends later."""
    join(me)
    dist.barrier()
    if me.rank == 0:
        data = torch.zeros(1000)
        sources = [dist.recv(data)]
        say(entering=True)
        sources.append(dist.recv(data))
        say(received=sources)
        attempt("first", lambda: dist.recv(data))
        return
    if me.rank == 2:
        accept_orders()
        await_order()
    dist.send(torch.ones(1000), 0)
    dist.destroy_process_group()
    say(left=True)


def wait_for_a_busy_peer(me: Me, busy_s: float) -> None:
    """Rank 0 computes; each of the others waits for it in a way of its own."""
    join(me)
    data = torch.ones(1000)
    dist.barrier()
    wall_s, cpu_s = time.monotonic(), time.process_time()
    if me.rank == 0:
        while time.monotonic() < wall_s + busy_s:
            pass
    if me.rank < 2:
        dist.all_reduce(data)
    else:
        finish(dist.all_reduce(data, async_op=True), "wait" if me.rank == 2 else "future")
    say(used={"wall_s": time.monotonic() - wall_s, "cpu_s": time.process_time() - cpu_s})
