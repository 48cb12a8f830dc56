"""Exchanges of a probe: collectives and messages by size and number of ranks, while all ranks of the host do the same."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwright.comm.communicator import Communicator
from meshwright.hardware.exchanges import EXCHANGES
from meshwright.measure.probe_sizes import COLLECTIVE_BYTES, EXCHANGE_ROUNDS, exchange_name
from meshwright.ranks.groups import subgroup
from meshwright.ranks.world import World

__all__: list[str] = []

_TAG = 1


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


def _sizes(world_size: int) -> Iterator[int]:
    size = 2
    while size < world_size:
        yield size
        size *= 2
    yield world_size


def _exchange(kind: str, group: Communicator, num_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Return the exchange of a tensor of so many bytes, or of a little less where the ranks do not divide it."""
    piece = torch.zeros(num_bytes // 4 // group.size, device=device)
    whole = torch.zeros(piece.numel() * group.size, device=device)
    message = torch.zeros(num_bytes // 4, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(message).wait(),
        "all_gather": lambda: group.all_gather_stacked(whole, piece),
        "reduce_scatter": lambda: group.reduce_scatter_stacked(piece, whole),
        "message": lambda: _there_and_back(group, message),
    }
    return calls[kind]


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
