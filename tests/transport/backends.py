"""Which backend is under test, what gloo can be asked to confirm, and the groups that a rank function works on."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tests.transport.collectives import Call


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


_DEFAULT = "shm" if _is_installed("meshwright.comm.shm.backend") else "gloo"
BACKEND = os.environ.get("MESHWRIGHT_TEST_BACKEND", _DEFAULT)
"""The backend under test. The tests themselves are proven by running them with gloo here."""

IS_GLOO = BACKEND == "gloo"

ADDS_IN_RANK_ORDER = not IS_GLOO
"""Whether a float sum is ((x0 + x1) + x2) + ... to the last bit; gloo's ring starts elsewhere for every part."""

TIMEOUT_S = 30.0
"""How long one operation may wait in a group: below the deadline, so that the error names the operation."""
DEADLINE_S = 40.0
"""How long a rank may work on its groups: then it writes down where it stands and ends, and with it the test."""

# Kinds where gloo refuses what torch itself allows (sizes that differ from rank to rank, results that are stacked), or ends the
# process where a call is wrong.
_NOT_IN_GLOO = ("all_gather_uneven", "all_to_all_uneven", "all_gather_stacked", "all_gather_coalesced", "special")
if torch.__version__ < "2.12":
    _NOT_IN_GLOO += ("all_to_all",)  # from lists of tensors: the gloo of torch 2.11 has `all_to_all_single` alone
# Kinds where gloo heeds strides. In all others it reads and writes as if there were none: wrong values, without an error.
_STRIDES_IN_GLOO = ("all_gather", "all_gather_tensor", "gather", "all_to_all", "reduce_scatter_tensor")


def gloo_takes(call: Call) -> bool:
    """Whether gloo does the same, and does it right, so that it can prove the tests and confirm our results."""
    if call.dtype == torch.int16 or call.kind in _NOT_IN_GLOO:
        return False
    if call.kind == "gather" and call.dtype.is_complex:
        return False
    if call.dtype == torch.bool and call.op == "sum":
        return False  # it adds the bytes: the entries come out as 2, which is no bool
    is_dense = {call.input_layout, call.output_layout} <= {"plain", "offset"}
    return is_dense or call.kind in _STRIDES_IN_GLOO


def shared_memory_names() -> set[str]:
    """The names in /dev/shm now, for checks that groups leave none behind."""
    return set(os.listdir("/dev/shm"))


def new_group(ranks: Sequence[int], backend: str = BACKEND, timeout_s: float = TIMEOUT_S) -> dist.ProcessGroup | None:
    """Make a group; every rank of the world has to call it. None for a rank outside."""
    timeout = datetime.timedelta(seconds=timeout_s)
    group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
    if dist.get_rank() not in ranks:
        return None
    # A backend that cannot be had may be replaced by gloo, and then every test would pass without a test of it.
    found = group._get_backend(torch.device("cpu")).name()
    if found != backend:
        raise RuntimeError(f"the group of ranks {list(ranks)} has the backend {found!r} in place of {backend!r}")
    return group


@contextlib.contextmanager
def groups_of(
    ranks_of_groups: Sequence[Sequence[int]], backend: str = BACKEND, deadline_s: float = DEADLINE_S
) -> Iterator[list[dist.ProcessGroup | None]]:
    """Make a group for each set of ranks, and take them all down where the block has ended well on all ranks.

    After an exception nothing is taken down: the other ranks may wait inside, and the pool replaces all of them.
    """
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    groups = [new_group(ranks, backend) for ranks in ranks_of_groups]
    yield groups
    dist.barrier()  # of the world: nobody takes down what a slower peer still reads
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)
    dist.barrier()  # so that whoever looks next sees everything gone
    faulthandler.cancel_dump_traceback_later()


def subsets(num_ranks: int) -> list[list[int]]:
    """Groups that overlap, and in which a rank's number differs from its number in the world."""
    return {
        2: [],
        3: [[0, 2], [1, 2]],
        4: [[1, 3], [0, 2], [1, 2, 3], [0, 1, 3]],
        8: [[1, 6], [0, 2, 4, 6], [1, 3, 5, 7], [2, 5, 7], [4, 5, 6, 7]],
    }[num_ranks]
