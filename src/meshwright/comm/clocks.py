"""Clocks of ranks: how far each is from rank 0's, and how well that is known (ADR 0026).

Ranks of one host read one clock. Others ask rank 0 for its time and halve the round trip, as NTP does (RFC 5905, section 8).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Final

import torch

from meshwright.comm.communicator import Communicator
from meshwright.host import boot_id

__all__: list[str] = []

NUM_ROUNDS: Final = 16
"""Round trips, of which the shortest counts [count]."""
_TAG: Final = 2**31 - 2


@dataclasses.dataclass(frozen=True, slots=True)
class ClockReading:
    """One comparison of this rank's clock with rank 0's.

    Args:
        at_ns: This rank's time [ns].
        offset_ns: What is added to it to have rank 0's [ns].
        error_ns: How much that may be wrong, half the shortest round trip; 0 where both read one clock [ns].
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def clock_name() -> str:
    """Return a text that is the same in two processes only if they read one CLOCK_MONOTONIC: boot and time namespace."""
    if boot := boot_id():
        namespace = ""
        with contextlib.suppress(OSError):  # kernels before 5.6 have one for all
            namespace = os.readlink("/proc/self/ns/time")
        return f"{boot} {namespace}"
    return f"process {os.getpid()} {time.monotonic_ns()}"  # not Linux: nothing is known, so each asks rank 0


def read_clocks(
    group: Communicator,
    device: torch.device,
    *,
    clock: Callable[[], int] = time.monotonic_ns,
    name: str | None = None,
) -> ClockReading:
    """Compare this rank's clock with that of the group's first rank; every rank calls it.

    Args:
        group: The ranks.
        device: Where messages lie.
        clock: This rank's clock [ns].
        name: Its name; ranks with one name share it. None is `clock_name()`.

    Raises:
        LostPeerError: A peer is gone.
    """
    names = group.all_gather_json(name or clock_name(), device=device)
    mine = ClockReading(clock(), 0, 0)
    for other, theirs in enumerate(names):
        if theirs == names[0]:
            continue
        if group.group_rank == 0:
            _answer(group, other, device, clock)
        elif group.group_rank == other:
            mine = _ask(group, device, clock)
    return mine


def _answer(group: Communicator, other: int, device: torch.device, clock: Callable[[], int]) -> None:
    message = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(NUM_ROUNDS):
        group.receive(message, other, _TAG)
        message.item()  # on a GPU: it has come
        message.fill_(clock())
        group.send(message, other, _TAG).wait()


def _ask(group: Communicator, device: torch.device, clock: Callable[[], int]) -> ClockReading:
    message = torch.zeros(1, dtype=torch.int64, device=device)
    best: ClockReading | None = None
    for _ in range(NUM_ROUNDS):
        begin = clock()
        group.send(message, 0, _TAG).wait()
        group.receive(message, 0, _TAG)
        theirs = int(message.item())
        end = clock()
        middle = (begin + end) // 2
        reading = ClockReading(middle, theirs - middle, (end - begin + 1) // 2)
        if best is None or reading.error_ns < best.error_ns:
            best = reading
    return best or ClockReading(clock(), 0, 0)
