"""Registration of the backend "shm" with torch.distributed; groups that cannot have it get gloo instead."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
from typing import Any

import torch.distributed as dist

from meshwright._torch_private import ProcessGroupGloo, offer_monitored_barrier
from meshwright.comm.shm.attach import CannotAttachError, attach
from meshwright.comm.shm.build import loaded_extension
from meshwright.host import usable_cores

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_told: set[str] = set()


def register_shm() -> None:
    """Make ``backend="shm"`` known to torch.distributed in this process; calling it again changes nothing.

    Afterwards `dist.init_process_group("shm")`, or "cpu:shm,cuda:nccl", and `dist.new_group(backend="shm")` exchange CPU
    tensors through memory that the ranks of one host share. A group without that memory (ranks on several hosts, no C++
    compiler, not Linux) gets gloo. Its rank 0 logs the reason in one line, under "meshwright".
    """
    if not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
        offer_monitored_barrier("shm")
        atexit.register(_leave_all)


def _leave_all() -> None:
    """Leave the groups that were not destroyed, and end their threads while the interpreter is still alive.

    A thread that runs a future's callback needs the interpreter; one that runs too late aborts the process.
    """
    extension = loaded_extension()
    if extension is not None:
        extension.leave_all()


def _create(given: Any, _options: Any) -> Any:
    """Return the backend for one group; torch.distributed calls this on every rank of it."""
    timeout = given.timeout
    timeout_s = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    global_ranks = list(given.global_ranks_in_group) or list(range(given.group_size))
    return make_backend(given.store, given.group_rank, global_ranks, timeout_s)


def make_backend(
    store: Any, rank: int, global_ranks: list[int], timeout_s: float, *, comes_within_timeout: bool = False
) -> Any:
    """Return the backend for one group, gloo's where its ranks cannot share memory; the extension calls this for a split.

    Args:
        store: The group's store.
        rank: This process's rank in the group.
        global_ranks: Global ranks by group rank.
        timeout_s: How long an operation may wait [s].
        comes_within_timeout: Every rank makes the group within that time, too; otherwise within the store's.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        attached = attach(store, rank, global_ranks, timeout if comes_within_timeout else None)
    except CannotAttachError as error:
        _tell(error, rank)
        return ProcessGroupGloo(store, rank, len(global_ranks), timeout=timeout)
    return attached.extension.ShmBackend(
        segment=attached.segment,
        global_ranks=global_ranks,
        process_files=attached.process_files,
        timeout_ms=max(1, round(timeout_s * 1000)),
        crowded=_num_ranks_here(len(global_ranks)) > usable_cores(),
    )


def _num_ranks_here(group_size: int) -> int:
    """Return the number of ranks on this host's cores, as far as this process can know."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit():
        return int(local)
    return max(group_size, dist.get_world_size() if dist.is_initialized() else 0)


def _tell(error: CannotAttachError, rank: int) -> None:
    text = str(error)
    if error.is_expected:
        _LOG.debug("gloo in place of shared memory: %s", text)
    elif rank == 0 and text not in _told:
        _told.add(text)
        _LOG.warning("no shared memory between the ranks of this host, they use gloo over TCP: %s", text)
