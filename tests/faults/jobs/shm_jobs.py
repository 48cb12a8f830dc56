"""What ranks do that a zygote has forked (`shm_zygote.py`). They say what happens, in lines; the test judges."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import json
import mmap
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BIG = 2 << 20  # float32 elements, 8 MiB: many times what the segment holds of one rank
LARGEST = 16 << 20  # 64 MiB
SMALL = 16
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Me:
    group: int
    rank: int
    size: int
    place: str
    timeout_s: float


_me: list[Me] = []


def be(me: Me) -> None:
    _me.append(me)


def say(**line: Any) -> None:
    """Tell the test; one write, so that the lines of several ranks do not mix."""
    if _me:
        line = {"group": _me[0].group, "rank": _me[0].rank, **line}
    text = json.dumps({key: value[:1500] if isinstance(value, str) else value for key, value in line.items()})
    os.write(1, text.encode() + b"\n")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def join(me: Me, name: str = "store", backend: str = "shm") -> str:
    """Join the ranks as any program does that needs no launcher; return the name of the backend that it got."""
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{me.place}/{name}", me.size),
        rank=me.rank,
        world_size=me.size,
        timeout=datetime.timedelta(seconds=me.timeout_s),
    )
    return backend_of(dist.group.WORLD)


def backend_of(group: Any) -> str:
    return group._get_backend(torch.device("cpu")).name()


def start(kind: str, data: torch.Tensor, *, root: int, async_op: bool = False) -> Any:
    """Start an operation of all ranks whose input, and for a receiver the output, is `data`."""
    is_root, size = dist.get_rank() == root, dist.get_world_size()
    if kind in ("send", "recv"):
        return _start_messages(kind, data, root, async_op)
    several = [torch.empty_like(data) for _ in range(size)]
    shorter = data.new_empty(len(data) // size)
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda **how: dist.all_reduce(data, **how),
        "all_gather": lambda **how: dist.all_gather(several, data, **how),
        "all_gather_into_tensor": lambda **how: dist.all_gather_into_tensor(torch.cat(several), data, **how),
        "reduce_scatter": lambda **how: dist.reduce_scatter_tensor(shorter, data, **how),
        "broadcast": lambda **how: dist.broadcast(data, root, **how),
        "reduce": lambda **how: dist.reduce(data, root, **how),
        "gather": lambda **how: dist.gather(data, several if is_root else None, root, **how),
        "scatter": lambda **how: dist.scatter(shorter, list(data.chunk(size)) if is_root else None, root, **how),
        "all_to_all": lambda **how: dist.all_to_all_single(several[0], data, **how),
        "barrier": dist.barrier,
    }
    return calls[kind](async_op=async_op)


def _start_messages(kind: str, data: torch.Tensor, root: int, async_op: bool) -> Any:
    """The root sends to all others, or receives from all of them."""
    is_sender = (dist.get_rank() == root) == (kind == "send")
    peers = [rank for rank in range(dist.get_world_size()) if rank != root] if dist.get_rank() == root else [root]
    if async_op:
        return [(dist.isend if is_sender else dist.irecv)(data, peer) for peer in peers][-1]
    for peer in peers:
        (dist.send if is_sender else dist.recv)(data, peer)
    return None


def finish(work: Any, form: str) -> None:
    if form == "wait":
        work.wait()
    elif form == "future":
        work.get_future().wait()


def attempt(name: str, body: Callable[[], Any]) -> None:
    """Say how something ended, and when."""
    begin = time.monotonic()
    try:
        result = body()
    except Exception as error:
        told = {"kind": type(error).__name__, "text": str(error)[:1000], "peer": getattr(error, "group_rank", None)}
        say(**{name: {**told, "at": time.monotonic(), "began": begin}})
    else:
        result = result if isinstance(result, int | float | str | list | bool | None) else None
        say(**{name: {"kind": None, "result": result, "at": time.monotonic(), "began": begin}})


def attempt_others(victim: int) -> None:
    """Use the group again, in every way that has a path of its own."""
    attempt("again", lambda: dist.all_reduce(torch.ones(1)))
    attempt("posted", lambda: dist.all_reduce(torch.ones(1), async_op=True).wait())
    attempt("barrier", dist.barrier)
    if victim != dist.get_rank():
        attempt("send", lambda: dist.send(torch.ones(1), victim))


def wait_for_peers_death(me: Me, kind: str, count: int, form: str, victim: int) -> None:
    """All but the victim go into an operation that needs it."""
    join(me)
    dist.barrier()
    if me.rank == victim:
        say(ready=True)
        signal.pause()
    data = torch.ones(count)
    say(entering=True)
    attempt("first", lambda: finish(start(kind, data, root=victim, async_op=form != "sync"), form))
    attempt_others(victim)


def wait_alone(me: Me) -> None:
    """Rank 0 goes into a barrier to which no other comes."""
    join(me)
    dist.barrier()
    if me.rank != 0:
        signal.pause()
    attempt("first", dist.barrier)


class HalfMapping:
    """Memory whose second half is not there yet: whoever touches it stands still until the test lets it go on, or kills it.

    The file behind it ends half-way, so that a copy of it raises SIGBUS at a known byte; the handler returns, and the same
    instruction raises it again. Each time the test hears of it over a pipe.
    """

    def __init__(self, count: int) -> None:
        self.num_bytes = 4 * count
        self.file = os.memfd_create("half")
        os.ftruncate(self.file, self.num_bytes)
        memory = mmap.mmap(self.file, self.num_bytes)
        self.data = torch.frombuffer(memory, dtype=torch.float32)
        self.data[: count // 2] = 1.0
        os.ftruncate(self.file, self.num_bytes // 2)

    def tell_when_reached(self, me: Me) -> None:
        path = f"{me.place}/reached"
        os.mkfifo(path)
        # For both ends, so that it opens without a reader; a full pipe is no matter, one byte says all.
        told = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        signal.signal(signal.SIGBUS, lambda *_: None)
        say(half=f"/proc/self/fd/{self.file}".replace("self", str(os.getpid())), bytes=self.num_bytes)


def stand_inside(me: Me, kind: str, count: int, victim: int) -> None:
    """The victim stands still in the middle of a transfer; the others wait for it."""
    join(me)
    dist.barrier()
    data = torch.ones(count)
    if me.rank == victim:
        half = HalfMapping(count)
        data = half.data
        half.tell_when_reached(me)
    say(entering=True)
    attempt("first", lambda: [start(kind, data, root=victim), round(float(data.double().sum()))][1])
    if me.rank == victim:
        signal.set_wakeup_fd(-1)
    attempt_others(victim)


def await_order() -> None:
    """Wait until the test says: now."""
    signal.sigwait([signal.SIGUSR1])


def accept_orders() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    say(ready=True)


def enter_late(me: Me, kind: str, count: int, victim: int) -> None:
    """The victim goes in first and is killed there; the others come after its death."""
    join(me)
    dist.barrier()
    data = torch.full((count,), float(me.rank + 1))
    if me.rank != victim:
        accept_orders()
        await_order()
    say(entering=True)
    attempt("first", lambda: [start(kind, data, root=victim), data[-1].item()][1])
    if me.rank == victim:
        signal.pause()  # it has sent a message, and is killed after that
    attempt_others(victim)


def be_in_a_part(me: Me, members: list[int], victim: int) -> None:
    """The victim's peers wait for it in a group of some of the ranks."""
    join(me)
    part = dist.new_group(members, backend="shm")
    dist.barrier()
    if me.rank == victim or me.rank not in members:
        say(ready=True)
        signal.pause()
    say(entering=True)
    attempt("first", lambda: dist.all_reduce(torch.ones(BIG), group=part))
    attempt("in the part", lambda: dist.all_reduce(torch.ones(1), group=part))
    attempt_others(victim)


def leave(me: Me, how: str, victim: int) -> None:
    """The victim goes, by its own will, while the others wait for it."""
    join(me)
    dist.barrier()
    if me.rank == victim:
        accept_orders()
        await_order()
        if how == "destroy":
            dist.destroy_process_group()
            signal.pause()
        if how == "abort":
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
            signal.pause()
        if how == "exit":
            os._exit(0)
        if how == "raise":
            raise ValueError("mine")
        return  # and the interpreter ends
    say(entering=True)
    attempt("first", lambda: dist.all_reduce(torch.ones(BIG)))
    attempt_others(victim)
    signal.pause()  # rather than end: the peers shall hear of the victim alone


def have_many_outstanding(me: Me, victim: int) -> None:
    """Operations of every sort at once, all of which need the victim."""
    join(me)
    dist.barrier()
    if me.rank == victim:
        say(ready=True)
        signal.pause()
    posted = [dist.all_reduce(torch.ones(BIG), async_op=True) for _ in range(3)]
    posted += [dist.irecv(torch.ones(BIG), victim, tag=1), dist.isend(torch.ones(BIG), victim, tag=2)]
    futures = [work.get_future() for work in posted]
    chained = [future.then(lambda done: done.value()) for future in futures]
    say(entering=True)
    attempt("first", dist.barrier)
    for name, works in (("posted", posted[::-1]), ("futures", futures), ("chained", chained)):
        for work in works:
            attempt(name, work.wait)
