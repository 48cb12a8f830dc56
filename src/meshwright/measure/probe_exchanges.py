"""Exchanges of a probe: collectives and messages by size and number of ranks, while all ranks of the host do the same."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwright.comm.communicator import Communicator
from meshwright.hardware.exchanges import EXCHANGES
from meshwright.measure.probe_sizes import COLLECTIVE_BYTES, EXCHANGE_ROUNDS, SET_BYTES, exchange_name
from meshwright.ranks.groups import subgroup
from meshwright.ranks.world import World

__all__: list[str] = []

_TAG = 1

_SKEW_SIZES, _SKEW_STEPS, _SKEW_ROUNDS = ((512, 256), (256, 512)), 40, 3
"""Products between two exchanges, a millisecond or two each, how many, and how often."""

_MOST_TURNS = 32
"""Tensors of one size that are exchanged in turn, at most [count]."""


def measure_exchanges(world: World, wait: Callable[[], None]) -> dict[str, list[float]]:
    """Return the times of each kind, number of ranks and size [s]. Every rank of the world calls it.

    Numbers of ranks are 2, 4, 8 and so on, and all of them; groups of so many exchange at the same time.

    Args:
        world: This process's world.
        wait: Returns when the device has done its work.
    """
    found: dict[str, list[float]] = {}
    for size in _sizes(world.world_size):
        groups = [tuple(range(world.world_size))[at : at + size] for at in range(0, world.world_size, size)]
        group = subgroup(world, groups, "world")
        for kind, num_bytes in itertools.product(EXCHANGES, COLLECTIVE_BYTES):
            if group.size == size and (kind != "message" or size == 2):
                call = _exchange(kind, group, num_bytes, world.device)
                found[exchange_name(kind, size, num_bytes)] = _times(call, wait, ways=2 if kind == "message" else 1)
        world.default_group.barrier()
    return found


def measure_skew(world: World) -> float:
    """Return what ranks wait for each other, over what they compute between two exchanges [ratio]. Every rank calls it.

    The same products are run with and without an exchange of next to nothing behind each, in the mean: what disturbs one rank for
    a moment, all wait for.
    """
    group, one, other = world.default_group, torch.randn(_SKEW_SIZES[0]), torch.randn(_SKEW_SIZES[1])
    small = torch.zeros(2)
    found: list[float] = []
    for _ in range(_SKEW_ROUNDS):
        seconds: list[float] = []
        for has_work, is_together in ((True, False), (True, True), (False, True)):
            group.barrier()
            start = time.perf_counter()
            for _ in range(_SKEW_STEPS):
                if has_work:
                    torch.mm(one, other)
                if is_together:
                    group.all_reduce(small).wait()
            seconds.append(time.perf_counter() - start)
        alone, together, exchanges = seconds
        found.append(max(0.0, together - exchanges - alone) / alone)
    return statistics.median(found)


def _sizes(world_size: int) -> Iterator[int]:
    size = 2
    while size < world_size:
        yield size
        size *= 2
    yield world_size


def _exchange(kind: str, group: Communicator, num_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Return the exchange of a tensor of so many bytes, or of a little less where the ranks do not divide it.

    Tensors are taken in turn, since those of a pass are in no core's cache when they are exchanged.
    """

    def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        piece = torch.zeros(num_bytes // 4 // group.size, device=device)
        return piece, torch.zeros(piece.numel() * group.size, device=device), torch.zeros(num_bytes // 4, device=device)

    turns = itertools.cycle([tensors() for _ in range(min(_MOST_TURNS, max(1, SET_BYTES // num_bytes)))])

    def call() -> None:
        piece, whole, message = next(turns)
        if kind == "all_reduce":
            group.all_reduce(message).wait()
        elif kind == "all_gather":
            group.all_gather_stacked(whole, piece)
        elif kind == "reduce_scatter":
            group.reduce_scatter_stacked(piece, whole)
        else:
            _there_and_back(group, message)

    return call


def _there_and_back(group: Communicator, message: torch.Tensor) -> None:
    other = 1 - group.group_rank
    if group.group_rank == 0:
        group.send(message, other, _TAG).wait()
        group.receive(message, other, _TAG)
    else:
        group.receive(message, other, _TAG)
        group.send(message, other, _TAG).wait()


def _times(call: Callable[[], Any], wait: Callable[[], None], *, ways: int) -> list[float]:
    # Every rank repeats as often: a time that ended the loop would end it at different rounds.
    samples: list[float] = []
    for round_index in range(2 + EXCHANGE_ROUNDS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        if round_index >= 2:
            samples.append((time.perf_counter() - start) / ways)
    return samples
