"""What every rank runs: make the sides of a case, find how many calls fill a block, and time blocks that alternate."""

from __future__ import annotations

import datetime
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import ops
import torch
import torch.distributed as dist

import meshwright as mw

LEAST_CALLS = 2
MOST_CALLS = 200_000
WARM_UP_CALLS = 3


def compare_on_rank(settings: dict[str, Any], communicator: Any = None) -> dict[str, Any]:
    """Run all cases on this rank.

    Args:
        settings: `left`, `peer`, `cases` [[op, bytes], ...], `blocks`, `block_s`, `timeout_s`.
        communicator: MPI's; where there is one, it is the peer.

    Returns:
        The cases' rows, the same on every rank.
    """
    mw.join_world(timeout_s=settings["timeout_s"])
    torch.set_num_threads(1)
    gc.disable()  # a collection would fall into some block of one side
    limit = datetime.timedelta(seconds=settings["timeout_s"])
    # The world's own group keeps out of it: it does the barriers before the blocks, for both sides alike.
    left = dist.new_group(backend=settings["left"], timeout=limit)
    peer = communicator or dist.new_group(backend=settings["peer"], timeout=limit)
    rows = []
    try:
        for op, num_bytes in settings["cases"]:
            sides = _sides(op, num_bytes, left, peer, has_copies=communicator is None)
            rows.append({"op": op, "bytes": num_bytes, **_sample(sides, settings)})
            del sides  # the next case has the memory to itself
    finally:
        for group in (left, peer) if communicator is None else (left,):
            dist.destroy_process_group(group)
    return {"rows": rows}


def _sides(op: str, num_bytes: int, left: Any, peer: Any, *, has_copies: bool) -> dict[str, ops.Op]:
    """Return the sides in the order of a pair of even number."""
    make = ops.COLLECTIVES[op]
    sides = {"left": make(num_bytes, left)}
    if not has_copies:
        return {**sides, "peer": ops.mpi_all_reduce(num_bytes, peer)}
    sides["peer"] = make(num_bytes, peer)
    if op == "all_reduce" and num_bytes >= 2**24:
        sides["copies"] = ops.copies(num_bytes, staging_bytes=num_bytes)
        sides["copies_small_buffer"] = ops.copies(num_bytes, staging_bytes=ops.PIECE_BYTES)
    return sides


def _sample(sides: dict[str, ops.Op], settings: dict[str, Any]) -> dict[str, Any]:
    for name, side in sides.items():
        side.check(name)
    calls = {name: _calls_for(side.run, settings["block_s"]) for name, side in sides.items()}
    for name, side in sides.items():
        _elapsed(side.run, calls[name])
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(settings["blocks"]):
        # Forwards and backwards in turn: of any two sides each goes first every other time.
        for name in sides if pair % 2 == 0 else reversed(sides):
            samples[name].append(_elapsed(sides[name].run, calls[name]) / (calls[name] * sides[name].per_run))
    return {"calls_per_block": calls, "samples_s": _slowest(samples)}


def _elapsed(run: Callable[[], Any], num_calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        run()
    return time.perf_counter() - start


def _calls_for(run: Callable[[], Any], block_s: float) -> int:
    """Return how many calls take about `block_s`; all ranks come to the same number, by the slowest of them."""
    _elapsed(run, WARM_UP_CALLS)
    calls = 1
    while (took_s := _agreed(run, calls)) < block_s / 4 and calls < MOST_CALLS:
        calls *= 4
    # A single trial may have met a stall, and all blocks would be short for it.
    took_s = statistics.median([took_s, _agreed(run, calls), _agreed(run, calls)])
    return min(MOST_CALLS, max(LEAST_CALLS, round(calls * block_s / took_s)))


def _agreed(run: Callable[[], Any], num_calls: int) -> float:
    """Return the time of the slowest rank, the same everywhere."""
    elapsed = torch.tensor([_elapsed(run, num_calls)], dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def _slowest(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return, block by block, the time of the rank that took longest."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, samples)
    return {name: [max(times) for times in zip(*(each[name] for each in gathered), strict=True)] for name in samples}
