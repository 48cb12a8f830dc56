"""Jobs of ranks that may not be able to share memory, or that have little of what others share memory with."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from tests.faults.jobs.shm_jobs import LARGEST, Me, backend_of, die_with_parent, join, say

from meshwright.comm.shm.build import load_extension
from meshwright.ranks.join import join_world

NOBODY = 65534
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(kind: str, where: str, options: str = "") -> None:
    """Mount something that no other process sees."""
    _checked(_LIBC.unshare(_CLONE_NEWNS))
    _checked(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _checked(_LIBC.mount(kind.encode(), where.encode(), kind.encode(), 0, options.encode()))


def _have_little_dev_shm() -> None:
    _mount("tmpfs", "/dev/shm", "size=1M")
    found = os.statvfs("/dev/shm")
    say(dev_shm=found.f_blocks * found.f_frsize)


def _live_in_another_process_namespace() -> None:
    """As in a container of its own: process numbers mean other processes there."""
    _checked(_LIBC.unshare(_CLONE_NEWPID))
    child = os.fork()  # the first process of the new namespace; it goes on as the rank
    if child != 0:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    die_with_parent()
    _mount("proc", "/proc")
    say(number=os.getpid())


def _become_nobody() -> None:
    load_extension()  # from a cache that the other user cannot read
    _become_nobody_without_cache()


def _become_nobody_without_cache() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    die_with_parent()  # which a change of user undoes


def _write_small_files_only() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _have_no_compiler() -> None:
    os.environ |= {"PATH": "/nonexistent", "CXX": "", "MESHWRIGHT_CACHE": "cache"}


CONDITIONS: dict[str, Callable[[], None]] = {
    "little /dev/shm": _have_little_dev_shm,
    "process namespace": _live_in_another_process_namespace,
    "nobody": _become_nobody,
    "nobody without cache": _become_nobody_without_cache,
    "file size limit": _write_small_files_only,
    "no compiler": _have_no_compiler,
}


def exchange(me: Me, condition: str = "", ranks: list[int] | None = None, count: int = LARGEST) -> None:
    """Exchange under a condition that holds for these ranks, or for all."""
    os.chdir(me.place)
    if condition and (ranks is None or me.rank in ranks):
        try:
            CONDITIONS[condition]()
        except OSError as error:
            say(prepared=f"{condition}: {error}")
            signal.pause()
    say(prepared="")
    say(backend=join(me))
    say(right=exchanges_are_right(me, count))
    dist.destroy_process_group()


def exchanges_are_right(me: Me, count: int) -> bool:
    total = sum(range(1, me.size + 1))
    data = torch.full((count,), float(me.rank + 1))
    dist.all_reduce(data)
    right = bool((data == total).all())
    dist.broadcast(data.fill_(me.rank), me.size - 1)
    right = right and bool((data == me.size - 1).all())
    following, preceding = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    receipt = dist.irecv(data, preceding)
    dist.isend(torch.full((count,), float(me.rank)), following).wait()
    receipt.wait()
    return right and bool((data == preceding).all())


def join_by_environment(me: Me, port: int) -> None:
    """Join as a rank that torchrun or Kubernetes has started."""
    os.environ |= {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    world = join_world(join_timeout_s=20.0)
    say(backend=backend_of(world.default_group.process_group), right=exchanges_are_right(me, 1000))
    sys.stdout.flush()
