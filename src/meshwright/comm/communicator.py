"""Communicator: the only caller of torch.distributed's collectives. It names and counts each, and explains its errors."""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright._torch_private import cpu_backend, cpu_backend_name, exchanges_by_gloo_alone
from meshwright._torch_texts import says_peer_gone
from meshwright.comm import group_calls
from meshwright.comm.cuts import cut_at
from meshwright.comm.ledger import Ledger, LedgerEntry
from meshwright.comm.peer_calls import PeerCalls, lengths_of, with_kind
from meshwright.comm.shm.transport_errors import DisagreementError, PeerGoneError, TransportError
from meshwright.comm.spans import WAIT, Flight
from meshwright.errors import InternalError, LostPeerError, MeshwrightError

__all__: list[str] = []


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether an exception says that another rank is gone, rather than that something is wrong here."""
    if isinstance(error, (LostPeerError, TransportError)):
        return not isinstance(error, TransportError) or isinstance(error, PeerGoneError)
    return isinstance(error, RuntimeError) and says_peer_gone(error)


class Pending:
    """An exchange under way. Call `wait()` before its tensor is used."""

    __slots__ = ("_communicator", "_entry", "_flight", "_name", "_work")

    def __init__(
        self,
        communicator: Communicator,
        name: str,
        work: Any,
        entry: LedgerEntry | None,
        flight: Flight | None = None,
    ) -> None:
        self._communicator = communicator
        self._name = name
        self._work = work
        self._entry = entry
        self._flight = flight

    @property
    def is_done(self) -> bool:
        """Whether `wait()` would return at once."""
        if self._work is not None and not self._work.is_completed():
            return False
        if self._flight is not None:
            self._flight.is_over()
        return True

    def wait(self) -> None:
        """Wait for the result.

        Raises:
            LostPeerError: A peer is gone, or did not come within the timeout.
        """
        work, self._work = self._work, None
        if work is None:
            return
        start = time.perf_counter()
        details = None if self._flight is None else (*self._flight.details, "async")
        self._communicator.run_waiting(self._name, lambda: self._communicator.wait_for(work), details)
        if self._flight is not None:
            self._flight.is_over()
        if self._entry is not None:
            self._entry.wait_s += time.perf_counter() - start


class Communicator:
    """Collectives over the ranks of one group.

    Args:
        process_group: torch.distributed's group, or None for a group of one rank, which exchanges nothing.
        ranks: The global ranks of the group, in group order.
        rank: This process's global rank.
        ledger: Counts calls, bytes and waiting time.
        timeout_s: How long one exchange may wait [s].
        axis: The mesh axis that the group lies on, for the ledger.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        ranks: Sequence[int],
        rank: int,
        ledger: Ledger,
        timeout_s: float,
        axis: str = "world",
    ) -> None:
        if process_group is None and len(ranks) > 1:
            raise InternalError(f"a group of {len(ranks)} ranks needs a process group")
        self._held = [process_group]  # one list for all twins, so that `release` releases the group in all of them
        self.ranks = tuple(ranks)
        self.rank = rank
        self.group_rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.ledger = ledger
        self.timeout_s = timeout_s
        self.axis = axis
        name = "" if process_group is None else cpu_backend_name(process_group)
        self._has_cpu_backend = process_group is None or bool(name)
        self.shares_memory = name == "shm"  # for tensors on the CPU
        self.on_enter: Callable[[str], None] | None = None
        self.on_exit: Callable[[], None] | None = None
        self.calls: PeerCalls | None = None
        self.looks_out = process_group is not None and exchanges_by_gloo_alone(process_group)
        """Whether a wait has to be cut into short ones: gloo does not look around by itself."""

    def shares_memory_of(self, device: torch.device) -> bool:
        """Tell whether these ranks exchange a device's tensors through memory that they share."""
        return self.shares_memory and device.type == "cpu"

    def over(self, axis: str) -> Communicator:
        """Return the same ranks under another axis name, for the ledger."""
        twin = copy.copy(self)
        twin.axis = axis
        return twin

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch.distributed's group; None for a single rank, and after `release`."""
        return self._held[0]

    @property
    def _alive_group(self) -> dist.ProcessGroup:
        group = self._held[0]
        if group is None:
            raise RuntimeError("the group has been released")
        return group

    def release(self) -> None:
        """Release the group, here and in all twins; gloo closes its connections with the last reference."""
        self._held[0] = None

    def message_device(self, device: torch.device | None = None) -> torch.device:
        """Return where small messages lie: on the CPU, so that no GPU is waited for; on `device` in a group of NCCL alone."""
        if self._has_cpu_backend:
            return torch.device("cpu")
        return device or torch.device("cuda", torch.cuda.current_device())

    def span_details(self, tensor_bytes: int, peer: int | None = None) -> tuple[Any, ...] | None:
        """Return what an exchange's span tells, for `plain_details`; None where nothing is recorded."""
        ledger = self.ledger
        return None if ledger.recorder is None else (self, tensor_bytes, ledger.aside > 0, peer)

    def run_waiting(self, name: str, wait: Callable[[], Any], details: tuple[Any, ...] | None = None) -> Any:
        """Call a function that waits for peers: a lost peer is named, and with `span_details` the wait is recorded."""
        recorder = None if details is None else self.ledger.recorder
        begin = 0 if recorder is None else recorder.now()
        if self.on_enter is not None:
            self.on_enter(name)
        try:
            return wait()
        except RuntimeError as error:
            if is_lost_peer(error):
                text = (str(error).strip().splitlines() or ["no reason given"])[0]
                raise self._explained(
                    f"{name} over ranks {self._ranks_text()} (axis {self.axis}) failed on rank {self.rank}: {text}",
                    error.group_rank if isinstance(error, PeerGoneError) else -1,
                ) from error
            if isinstance(error, DisagreementError) and self.calls and (told := self.calls.apart(self.ranks, error)):
                raise told from error
            raise
        finally:
            if recorder is not None:
                recorder.add(WAIT, name, begin, details)
            if self.on_exit is not None:
                self.on_exit()

    def _explained(self, text: str, peer: int) -> MeshwrightError:
        """Return the error of the rank that raised while this one waits for it, or this rank's own account."""
        told = None
        if self.calls is not None:
            self.calls.has_given_up = True
            told = self.calls.others_error()
        # It may be this rank itself: it was stopped, and the others have given it up.
        return told or LostPeerError(text, rank=self.rank, peer=self.ranks[peer] if 0 <= peer < self.size else None)

    def wait_for(self, work: Any) -> None:
        """Wait for an exchange; with gloo, also end where a rank has raised and will not come."""
        if self.looks_out and self.calls is not None and self.calls.current:
            self.calls.wait_for(work)
        elif work is not None:
            work.wait()

    def _ranks_text(self) -> str:
        return str(list(self.ranks)) if self.size <= 8 else f"{self.ranks[0]}..{self.ranks[-1]} ({self.size})"

    def issue(
        self,
        name: str,
        tensor_bytes: int,
        call: Callable[[bool], Any],
        *,
        async_op: bool = False,
        peer: int | None = None,
    ) -> Pending:
        """Count an exchange and start it, for the collectives below and those of other modules of this package.

        Args:
            name: The collective's name in the ledger.
            tensor_bytes: Bytes for the ledger [bytes].
            call: Starts the exchange; its argument tells whether it may return before the end.
            async_op: That argument.
            peer: The group's rank that it goes to; None for a collective.

        Raises:
            LostPeerError: A peer is gone, or did not come within the timeout.
        """
        entry = self.ledger.record(name, self.axis, tensor_bytes, self.size)
        details, recorder = self.span_details(tensor_bytes, peer), self.ledger.recorder
        if async_op:
            flight = None if recorder is None or details is None else recorder.begin_flight(name, details)
            return Pending(self, name, self.run_waiting(name, lambda: call(True)), entry, flight)
        start = time.perf_counter()
        if self.looks_out:
            self.run_waiting(name, lambda: self.wait_for(call(True)), details)
        else:
            self.run_waiting(name, functools.partial(call, False), details)
        entry.wait_s += time.perf_counter() - start
        return Pending(self, name, None, entry)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Pending:
        """Replace the tensor, on every rank, by the sum ("sum"), "max" or "min" over all ranks. In place."""
        if self.size == 1:
            return Pending(self, "all_reduce", None, None)
        return self.issue(
            "all_reduce",
            tensor.nbytes,
            lambda later: group_calls.all_reduce(self._alive_group, tensor, op, later),
            async_op=async_op,
        )

    def all_reduce_together(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor, on every rank, by the sum over all ranks. In place; counted as one exchange."""
        if self.size == 1:
            return

        def call(later: bool) -> Any:
            options = dist.AllreduceCoalescedOptions()
            options.asyncOp = later
            work = self._alive_group.allreduce_coalesced(list(tensors), options)
            return work if later or work is None else work.wait()  # None: NCCL's stream waits, not the host

        self.issue("all_reduce", sum(tensor.nbytes for tensor in tensors), call)

    def all_gather_into(self, flat: torch.Tensor, segment: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Fill `flat`, [size * n], with every rank's `segment`, [n], in group order; `segment` may be its own part of it."""
        if self.size == 1:
            if flat.data_ptr() != segment.data_ptr():
                flat.copy_(segment)
            return Pending(self, "all_gather", None, None)
        # Bytes: not every backend supports every dtype.
        output, source = flat.view(torch.uint8), segment.view(torch.uint8)
        return self.issue(
            "all_gather",
            flat.nbytes,
            lambda later: group_calls.all_gather_single(self._alive_group, output, source, later),
            async_op=async_op,
        )

    def all_gather_stacked(self, stacked: torch.Tensor, piece: torch.Tensor) -> None:
        """Fill `stacked`, [size * n, ...], with every rank's `piece`, [n, ...], in group order; both contiguous."""
        self.issue(
            "all_gather",
            stacked.nbytes,
            lambda later: group_calls.all_gather_single(self._alive_group, stacked, piece, later),
        )

    def reduce_scatter_stacked(self, own: torch.Tensor, stacked: torch.Tensor) -> None:
        """Fill `own`, [n, ...], with this rank's part of the sum of all `stacked`, [size * n, ...]; both contiguous."""
        self.issue("reduce_scatter", stacked.nbytes, lambda _: self._reduce_scatter(own, stacked))

    def reduce_slices(self, tensors: Sequence[torch.Tensor], ends: Sequence[int]) -> None:
        """Sum over the ranks, in place, this rank's slice of the concatenated tensors; the rest is undefined afterwards.

        Args:
            tensors: Contiguous, one dtype, [n_i] each; the same on every rank.
            ends: End of each rank's slice of the concatenated tensors, in group order; the last is their whole length.
        """
        if self.size == 1:
            return
        given = self.process_group if self.shares_memory_of(tensors[0].device) else None
        backend = None if given is None else cpu_backend(given)

        def call(_: bool) -> Any:
            if backend is None:
                return self._reduce_packed(tensors, ends)
            return backend.reduce_slices(list(tensors), list(ends))

        self.issue("reduce_scatter", sum(tensor.nbytes for tensor in tensors), call)

    def _reduce_packed(self, tensors: Sequence[torch.Tensor], ends: Sequence[int]) -> None:
        starts = [0, *ends[:-1]]
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        packed = tensors[0].new_zeros((self.size, width))
        places = list(cut_at(tensors, ends))
        for owner, at, part in places:
            packed[owner, at : at + part.numel()].copy_(part)
        summed = torch.empty_like(packed[0])
        self._reduce_scatter(summed, packed.view(-1))
        for owner, at, part in places:
            if owner == self.group_rank:
                part.copy_(summed[at : at + part.numel()])

    def _reduce_scatter(self, own: torch.Tensor, stacked: torch.Tensor) -> None:
        if not self.looks_out:
            group_calls.reduce_scatter_single(self._alive_group, own, stacked)
            return
        whole = stacked.clone()  # torch does the same with gloo, but without a timed wait
        self.wait_for(group_calls.all_reduce(self._alive_group, whole, "sum", True))
        own.copy_(whole.view(self.size, -1)[self.group_rank].view_as(own))

    def broadcast(self, tensor: torch.Tensor, source: int = 0, *, async_op: bool = False) -> Pending:
        """Replace the tensor, on every rank, by that of the group's rank `source`. In place."""
        if self.size == 1:
            return Pending(self, "broadcast", None, None)
        return self.issue(
            "broadcast",
            tensor.nbytes,
            lambda later: group_calls.broadcast(self._alive_group, tensor, source, later),
            async_op=async_op,
        )

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        """Start sending a contiguous tensor to the group's rank `target`; it must not change until `wait()` returns."""
        flat = tensor.view(-1).view(torch.uint8)  # bytes: not every backend supports every dtype
        group = self._alive_group
        return self.issue("send", tensor.nbytes, lambda _: group.send([flat], target, tag), async_op=True, peer=target)

    def receive(self, tensor: torch.Tensor, source: int, tag: int, *, num_bytes: int | None = None) -> None:
        """Fill a contiguous tensor with what the group's rank `source` sends under this tag.

        `num_bytes` is the ledger's count where the tensor has more room than is expected.
        """
        flat, tensor_bytes = tensor.view(-1).view(torch.uint8), tensor.nbytes if num_bytes is None else num_bytes
        entry = self.ledger.record("receive", self.axis, tensor_bytes, self.size)
        start = time.perf_counter()
        details = self.span_details(tensor_bytes, source)
        self.run_waiting("receive", lambda: self._alive_group.recv([flat], source, tag).wait(), details)
        entry.wait_s += time.perf_counter() - start

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in group order; all have one shape and dtype."""
        if self.size == 1:
            return [tensor.clone()]
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        self.issue(
            "all_gather",
            tensor.nbytes * self.size,
            lambda later: dist.all_gather(parts, tensor.contiguous(), group=self.process_group, async_op=later),
        )
        return parts

    def all_gather_uneven(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor where dim 0 differs from rank to rank: [n_i, ...] each."""
        if self.size == 1:
            return [tensor.clone()]
        length = torch.tensor([with_kind(tensor.shape[0], self.calls)], dtype=torch.int64, device=tensor.device)
        lengths = lengths_of([int(part) for part in self.all_gather(length)], self.ranks, self.calls)
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        return [part[:n] for part, n in zip(self.all_gather(padded), lengths, strict=True)]

    def all_gather_json(self, value: Any, *, device: torch.device | None = None) -> list[Any]:
        """Return every rank's JSON value. JSON is sent, never pickles, so that a peer cannot make this rank run code.

        `device` is for `message_device`.
        """
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        parts = self.all_gather_uneven(payload.to(self.message_device(device)))
        return [json.loads(bytes(part.cpu().numpy())) for part in parts]

    def barrier(self) -> None:
        """Return when every rank has called it."""
        group = self.process_group
        if group is None:
            return
        self.ledger.record("barrier", self.axis, 0, self.size)
        # The group's own limit holds, which lets the launching process report before the transport gives up.
        options = dist.BarrierOptions()
        options.device = self.message_device()
        self.run_waiting("barrier", lambda: self.wait_for(group.barrier(options)), self.span_details(0))
