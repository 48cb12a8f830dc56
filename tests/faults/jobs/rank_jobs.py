"""What ranks do in these tests. Each prints nothing and needs no data."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.ranks.join import join_world
from meshwright.ranks.world import World, current_world


def world() -> World:
    found = current_world()
    assert found is not None
    return found


def identity(value: Any) -> Any:
    return value


def place() -> dict[str, Any]:
    here = world()
    assert join_world() is here
    total = torch.full((3,), float(here.rank))
    here.default_group.all_reduce(total)
    return {
        "rank": here.rank,
        "sum": total.tolist(),
        "threads": torch.get_num_threads(),
        "launched": here.is_launched,
        "distributed": torch.distributed.get_rank(),
        "stop": here.stop_requested(),
    }


def chatter(count: int) -> None:
    for number in range(count):
        world().emit({"number": number})


def nothing() -> None:
    return None


def wait_forever() -> None:
    threading.Event().wait()


def train(steps: int, events: bool = False) -> list[float]:
    """A little training run: the same numbers on every rank, and the same in every run."""
    here = world()
    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)
    losses = []
    generator = torch.Generator().manual_seed(here.rank)
    for step in range(steps):
        if events:
            here.emit({"step": step, "pid": os.getpid()})
        here.report_progress(step, "forward")
        loss = (torch.randn(8, 64, generator=generator) @ weight).square().mean()
        here.report_progress(step, "backward")
        (gradient,) = torch.autograd.grad(loss, weight)
        here.default_group.all_reduce(gradient)
        with torch.no_grad():
            weight -= 0.01 * gradient / here.world_size
        losses.append(float(weight.detach().sum()))
    return losses


def loop_until_stopped(grandchildren: bool = False) -> int:
    """Exchange until all agree that somebody was asked to stop; return the step."""
    here = world()
    started = start_grandchildren() if grandchildren else []
    step = 0
    while True:
        here.report_progress(step, "forward")
        asked = torch.tensor([float(here.stop_requested())])
        here.default_group.all_reduce(asked, "max")
        if step == 3:
            here.emit({"running": here.rank, "pid": os.getpid(), "grandchildren": started})
        if asked.item():
            return step
        step += 1


def _sleep() -> None:
    threading.Event().wait()


def start_grandchildren() -> list[int]:
    """Start what a DataLoader starts, a forked child, and one that leads a session of its own."""
    forked = multiprocessing.get_context("fork").Process(target=_sleep, daemon=True)
    forked.start()
    own_session = subprocess.Popen(
        [sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True
    )
    return [forked.pid or 0, own_session.pid]


def deaf(deaf_rank: int) -> None:
    """Never look at the stop request; one rank ignores SIGTERM, too."""
    here = world()
    if here.rank == deaf_rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here.emit({"running": here.rank, "pid": os.getpid()})
    if here.rank != deaf_rank:
        while not here.stop_requested():
            threading.Event().wait(0.01)
        return
    while True:
        threading.Event().wait(1)


def die(rank: int, how: str) -> None:
    """One rank dies in step 2; the others wait for it."""
    here = world()
    here.report_progress(2, "forward")
    if here.rank == rank:
        if how in ("SIGKILL", "SIGSEGV"):
            os.kill(os.getpid(), getattr(signal, how))
        elif how == "abort":
            os.abort()
        elif how == "exit 0":
            os._exit(0)
        else:
            sys.exit(3)
    here.default_group.all_reduce(torch.ones(4))


def close_descriptors(rank: int) -> int:
    """One rank closes what it has open, as libraries that make daemons do."""
    here = world()
    here.report_progress(3, "forward")
    if here.rank == rank:
        os.closerange(3, 1024)
    return here.rank


def wait_inside(victim: int) -> None:
    """The victim waits in an all-reduce that the others never enter."""
    here = world()
    here.default_group.all_reduce(torch.ones(4))
    here.report_progress(5, "backward")
    here.emit({"pid": os.getpid(), "victim": here.rank == victim})
    if here.rank == victim:
        here.default_group.all_reduce(torch.ones(4))
    else:
        wait_forever()


class OddError(Exception):
    """Pickles, but cannot be built again."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


def fail(ranks: list[int], kind: str) -> None:
    """Some ranks raise, each its own text; the others wait for them."""
    here = world()
    here.default_group.all_reduce(torch.ones(4))
    if here.rank in ranks:
        text = f"broken on {here.rank}"
        if kind == "value":
            raise ValueError(text)
        if kind == "odd":
            raise OddError("this", "that")
        if kind == "blocked":
            try:
                raise ValueError(text)
            finally:
                wait_forever()
        if kind == "barrier":
            try:
                raise ValueError(text)
            finally:
                here.default_group.barrier()
        if kind == "lambda":
            return lambda: None  # type: ignore[return-value]
        if kind == "interrupt":
            raise KeyboardInterrupt
    try:
        here.default_group.all_reduce(torch.ones(4))
    except Exception as error:
        raise RuntimeError("training failed") from error  # looks first-hand, and is not


def handle_slowly(seconds: float) -> str:
    """Rank 0 handles an error for a while, which is no fault, while the others wait."""
    here = world()
    if here.rank == 0:
        try:
            raise FileNotFoundError("no data yet")
        except FileNotFoundError:
            threading.Event().wait(seconds)
            here.default_group.barrier()
    else:
        here.default_group.barrier()
    return "fine"


def hang() -> None:
    here = world()
    here.report_progress(4, "optimizer")
    if here.rank == 0:
        here.default_group.all_reduce(torch.ones(4))
    else:
        wait_forever()


def train_with_a_loss_that_raises(rank: int) -> None:
    """Take a step under dp in which one rank's loss raises."""

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        if world().rank == rank:
            raise ValueError("the user's own")
        return outputs.square().mean()

    model = mw.apply_plan(
        torch.nn.Linear(3, 2),
        f"dp={world().world_size}",
        loss_fn=loss,
        optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
    )
    model.step(torch.randn(2, 3))


def hang_in_a_thread(num_threads: int, exchange: str) -> None:
    """Wait on rank 1 for a thread that waits for ever; rank 0 waits for rank 1."""
    group = world().default_group
    if group.rank == 1:
        threads = [threading.Thread(target=wait_forever, daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        threads[0].join()
    if exchange == "barrier":
        group.barrier()
    group.all_reduce(torch.zeros(1))


def stop_self() -> None:
    here = world()
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    here.default_group.all_reduce(torch.ones(4))


def exhaust_address_space(num_bytes: int) -> None:
    here = world()
    if here.rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
        torch.ones(num_bytes, dtype=torch.uint8)
    here.default_group.barrier()


def exhaust_memory_group(directory: str) -> None:
    """Rank 1 moves into a memory group and takes more than that allows."""
    here = world()
    here.report_progress(7, "forward")
    if here.rank == 1:
        Path(directory, "cgroup.procs").write_text(str(os.getpid()))
        pulse = (
            here._link._pulse
        )  # a rank is in its group from the start, elsewhere; here the watcher must see the move
        while pulse._board.read(1).memory_group != directory:
            os.sched_yield()
        held = []
        while True:
            held.append(torch.ones(4 << 20, dtype=torch.uint8))
    here.default_group.barrier()


def launch_again() -> None:
    from meshwright.ranks.launch import launch

    launch(nothing, 2)


def fill(num_bytes: int) -> int:
    return len(bytes(num_bytes)) if num_bytes < 0 else num_bytes


def big(num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), world().rank, dtype=torch.uint8)


def circumstances() -> dict[str, Any]:
    """What a process has from whoever started it."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    death_signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))  # PR_GET_PDEATHSIG
    environment = dict(item.split(b"=", 1) for item in Path("/proc/self/environ").read_bytes().split(b"\0") if item)
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return {
        "session": (os.getsid(0), os.getpgid(0)) == (os.getpid(), os.getpid()),
        "streams": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
        "masks": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "threads": status["Threads"],
        "death signal": death_signal.value,
        "directory": os.getcwd(),
        "umask": status["Umask"],
        "oom score": Path("/proc/self/oom_score_adj").read_text(),
        "cores": os.sched_getaffinity(0),
        "limits": [
            resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS)
        ],
        "path": sys.path,
        "program": [*sys.argv, sys.executable],
        "shown": [part for part in Path("/proc/self/cmdline").read_text().split("\0") if part][-1],
        "variables": {name: value for name, value in os.environ.items() if not name.startswith("MESHWRIGHT_RUN")},
        "shown variables": {
            name: environment.get(name) == os.environb[name] for name in os.environb if name.startswith(b"MESHWRIGHT_")
        },
        "files": sorted(
            name.split("[")[0] for name in files if name.startswith(("/memfd:meshwright ", "socket", "pipe"))
        ),
    }


def draw() -> list[float]:
    """The first numbers that nobody has seeded."""
    import numpy as np

    return [random.random(), float(np.random.random())]


def hash_of(text: str) -> int:
    return hash(text)
