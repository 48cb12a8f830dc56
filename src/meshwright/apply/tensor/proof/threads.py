"""Ranks as threads of one process, whose exchanges meet at a barrier."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError

__all__: list[str] = []


class Meeting:
    """The barrier and the memory through which the threads exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=600.0)
        self.given: list[Any] = [None] * size


class ThreadGroup:
    """A Communicator among threads of one process, with the calls that layers need; all threads share the meeting."""

    def __init__(self, meeting: Meeting, size: int, group_rank: int) -> None:
        self.size = size
        self.group_rank = group_rank
        self._meeting = meeting

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        self._meeting.given[self.group_rank] = (name, tuple(tensor.shape), tensor)
        self._meeting.barrier.wait()
        everyone = list(self._meeting.given)
        self._meeting.barrier.wait()
        if len({entry[:2] for entry in everyone}) != 1:
            self._meeting.barrier.abort()
            raise DisprovedError(f"the ranks exchange different things: {[entry[:2] for entry in everyone]}")
        return [entry[2] for entry in everyone]

    def leave(self) -> None:
        """Meet the others at the end; a thread that exchanges more often than another would wait for it."""
        self._exchange("end", torch.empty(0))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        parts = [part.clone() for part in self._exchange(f"all_reduce {op}", tensor.detach())]
        self._meeting.barrier.wait()  # nobody writes before all have read
        stacked = torch.stack(parts)
        tensor.copy_({"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0))

    def all_gather_stacked(self, stacked: Tensor, piece: Tensor) -> None:
        parts = self._exchange("all_gather", piece.detach())
        stacked.copy_(torch.cat(parts))
        self._meeting.barrier.wait()

    def reduce_scatter_stacked(self, own: Tensor, stacked: Tensor) -> None:
        parts = self._exchange("reduce_scatter", stacked.detach())
        own.copy_(torch.stack(parts).sum(0).chunk(self.size)[self.group_rank])
        self._meeting.barrier.wait()
