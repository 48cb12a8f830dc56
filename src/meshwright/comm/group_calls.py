"""Calls of a process group's own collectives: what torch.distributed's functions of these names do, without their Python.

Those look for the default group, for coalescing, for modes and for a wrong rank at each call, in a dozen functions. A
communicator knows its group, and hands in plain tensors. A call that may return before the end returns the work, others None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

__all__: list[str] = []

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed these methods; earlier releases have the old names only.
_ALL_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
)
_ALL_GATHER_OPTIONS = distributed_c10d.AllgatherOptions  # pyright: ignore[reportPrivateImportUsage]


@functools.cache  # torch reads them and keeps none
def _options(kind: Callable[[], Any], later: bool, op: str = "", root: int = 0) -> Any:
    options = kind()
    options.asyncOp = later
    if op:
        options.reduceOp = _OPS[op]
    elif kind is distributed_c10d.BroadcastOptions:
        options.rootRank, options.rootTensor = root, 0
    return options


def _ended(work: Any, later: bool) -> Any:
    if later or work is None:  # None: NCCL's stream waits, not the host
        return work
    work.wait()
    return None


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def all_reduce(group: Any, tensor: Tensor, op: str, later: bool) -> Any:
    """Replace a tensor, on every rank, by the sum ("sum"), "max" or "min" over the group's ranks.

    Args:
        group: torch.distributed's group.
        tensor: Of any shape, the same on all ranks; complex ones are summed alone.
        op: "sum", "max" or "min".
        later: Whether the call may return before the end.

    Raises:
        ValueError: A largest or smallest complex number is asked for.
    """
    if op != "sum" and tensor.is_complex():
        raise ValueError(f"there is no {op} of complex numbers")
    return _ended(group.allreduce([_real(tensor)], _options(distributed_c10d.AllreduceOptions, later, op)), later)


def all_gather_single(group: Any, stacked: Tensor, piece: Tensor, later: bool) -> Any:
    """Fill `stacked`, [size * n, ...], with every rank's `piece`, [n, ...]; arguments as for `all_reduce`."""
    call = getattr(group, _ALL_GATHER)
    return _ended(call(_real(stacked), _real(piece), _options(_ALL_GATHER_OPTIONS, later)), later)


def reduce_scatter_single(group: Any, own: Tensor, stacked: Tensor) -> None:
    """Fill `own`, [n, ...], with this rank's part of the sum of all `stacked`, [size * n, ...]."""
    call = getattr(group, _REDUCE_SCATTER)
    _ended(call(_real(own), _real(stacked), _options(distributed_c10d.ReduceScatterOptions, False, "sum")), False)


def broadcast(group: Any, tensor: Tensor, source: int, later: bool) -> Any:
    """Replace a tensor, on every rank, by that of the group's rank `source`; arguments as for `all_reduce`."""
    return _ended(group.broadcast([tensor], _options(distributed_c10d.BroadcastOptions, later, "", source)), later)
