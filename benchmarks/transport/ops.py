"""The operations that are timed: each maker returns what one call is, and what the first call must have given.

Every side works on memory of the same kind: torch allocates all of it, and the side of MPI gets a NumPy view. (NumPy asks the
kernel for huge pages where torch does not, and that alone would move the large sizes.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

FLOAT_BYTES = 4
# The copies go by pieces that stay in a core's second-level cache; smaller ones would time the calls from Python.
PIECE_BYTES = 256 * 2**10
# Newer torch warns at every call of the old names, which would be timed as well; older torch has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation of one side, on tensors of its own."""

    run: Callable[[], Any]
    result: torch.Tensor | None = None
    expected: torch.Tensor | None = None
    per_run: int = 1
    """How many times the operation's figure is in one `run`: a round trip has two."""

    def check(self, name: str) -> None:
        """Run once, compare, and leave zeros.

        Timing a wrong answer is worth nothing; and zeros stay zeros however often they are summed, where other numbers would
        run into infinity.
        """
        self.run()
        if self.result is None or self.expected is None:
            return
        if not torch.equal(self.result, self.expected.expand_as(self.result)):
            raise RuntimeError(f"{name}: the result is wrong, for example {self.result[:4].tolist()}")
        self.result.zero_()


def _mine(num_bytes: int) -> torch.Tensor:
    """Return this rank's tensor: its number plus one, everywhere."""
    return torch.full((num_bytes // FLOAT_BYTES,), float(dist.get_rank() + 1))


def _sum_of_all() -> torch.Tensor:
    size = dist.get_world_size()
    return torch.tensor([size * (size + 1) / 2])


def all_reduce(num_bytes: int, group: dist.ProcessGroup) -> Op:
    tensor = _mine(num_bytes)
    return Op(lambda: dist.all_reduce(tensor, group=group), tensor, _sum_of_all())


def all_gather_into_tensor(num_bytes: int, group: dist.ProcessGroup) -> Op:
    """`num_bytes` are those of the gathered tensor."""
    size = dist.get_world_size()
    part, whole = _mine(num_bytes // size), torch.empty(num_bytes // FLOAT_BYTES)
    expected = torch.arange(1.0, size + 1).repeat_interleave(part.numel())
    return Op(lambda: _all_gather(whole, part, group=group), whole, expected)


def reduce_scatter_tensor(num_bytes: int, group: dist.ProcessGroup) -> Op:
    """`num_bytes` are those of the tensor before it is scattered."""
    whole = _mine(num_bytes)
    part = torch.empty(whole.numel() // dist.get_world_size())
    return Op(lambda: _reduce_scatter(part, whole, group=group), part, _sum_of_all())


def broadcast(num_bytes: int, group: dist.ProcessGroup) -> Op:
    tensor = _mine(num_bytes)
    return Op(lambda: dist.broadcast(tensor, src=0, group=group), tensor, torch.ones(1))


def barrier(num_bytes: int, group: dist.ProcessGroup) -> Op:
    return Op(lambda: dist.barrier(group=group))


def send_recv(num_bytes: int, group: dist.ProcessGroup) -> Op:
    """Ping-pong between ranks 0 and 1; the others wait in the barrier that follows, which sleeps."""
    tensor, rank = _mine(num_bytes), dist.get_rank()

    def ping() -> None:
        dist.send(tensor, dst=1, group=group)
        dist.recv(tensor, src=1, group=group)

    def pong() -> None:
        dist.recv(tensor, src=0, group=group)
        dist.send(tensor, dst=0, group=group)

    if rank > 1:
        return Op(lambda: None, per_run=2)
    return Op(pong if rank else ping, tensor, torch.ones(1), per_run=2)


def copies(num_bytes: int, staging_bytes: int) -> Op:
    """The copies that an all-reduce over p ranks needs on each of them, however the ranks agree on who does what when.

    A tensor lies in its process's own memory, so whatever is to reach the others has to be copied into the shared buffer and
    out of it. With the work divided evenly, a rank copies (p - 1) / p of its tensor out, reads p slices of 1 / p each (its own
    and those of the others) and writes their sum, and copies (p - 1) / p in. Here each rank does that alone, with torch's
    `copy_` and `add`, on private memory, going through the tensor by pieces that fit a core's cache: no rank waits for
    another, and nothing crosses from core to core. What a real all-reduce takes beyond it is the price of sharing.

    It is a yardstick and no proven bound: with p > 2 a kernel that reads p slices in one pass would write the sum once where
    this one adds slice by slice (in cache), and a library may copy with other instructions than torch.

    Args:
        num_bytes: Size of the tensor.
        staging_bytes: Size of what stands for the shared buffer. As large as the tensor, every piece of it comes from the
            last-level cache or from memory; small, it is used again and again, as a pipelined algorithm would.
    """
    size = dist.get_world_size()
    piece_bytes = min(PIECE_BYTES, num_bytes // size)
    mine = list(torch.zeros(num_bytes // FLOAT_BYTES).split(piece_bytes // FLOAT_BYTES))
    round_bytes = size * piece_bytes
    num_staged = max(size, staging_bytes // round_bytes * size)
    staging = list(torch.zeros(num_staged * piece_bytes // FLOAT_BYTES).split(piece_bytes // FLOAT_BYTES))
    rounds = []
    for first in range(0, len(mine), size):
        at = first % num_staged
        rounds.append((mine[first], mine[first + 1 : first + size], staging[at + 1 : at + size]))

    def run() -> None:
        for own, others, staged in rounds:
            for source, target in zip(others, staged, strict=True):
                target.copy_(source)
            for part in staged:
                torch.add(own, part, out=own)
            for source, target in zip(staged, others, strict=True):
                target.copy_(source)

    return Op(run)


def mpi_all_reduce(num_bytes: int, communicator: Any) -> Op:
    from mpi4py import MPI

    tensor = _mine(num_bytes)
    array = tensor.numpy()
    return Op(lambda: communicator.Allreduce(MPI.IN_PLACE, array, op=MPI.SUM), tensor, _sum_of_all())


COLLECTIVES: dict[str, Callable[[int, dist.ProcessGroup], Op]] = {
    "all_reduce": all_reduce,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "broadcast": broadcast,
    "barrier": barrier,
    "send_recv": send_recv,
}
