"""Trace of some steps: clocks compared, spans recorded on all ranks, gathered and written as one file (ADR 0026)."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from meshwright._torch_private import cpu_backend_name
from meshwright.checkpoint.durable import told_of, write_new_file
from meshwright.comm.clocks import ClockReading, clock_name, read_clocks
from meshwright.comm.communicator import Communicator
from meshwright.comm.spans import SpanRecorder, plain_details
from meshwright.errors import ApplyError
from meshwright.run.parallel_model import ParallelModel
from meshwright.run.profiled_operators import MOST_OPERATORS, OperatorRecorder
from meshwright.spec.timeline import RankSpans, chrome_trace

__all__: list[str] = []

_TAG: Final = 2**31 - 3
_PIECE_BYTES: Final = 4 << 20
"""Largest message of a gather [bytes]."""


class StepTrace:
    """Records steps of a model on all ranks; every rank calls the same methods.

    Args:
        model: The model.
        clock: This rank's clock, which only moves forward [ns].
        clock_name: Its name; ranks with one name share it.
        profiler: Whether torch.profiler's operators are recorded too, which makes the steps longer.
    """

    def __init__(
        self,
        model: ParallelModel,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        clock_name: str = "",
        profiler: bool = False,
    ) -> None:
        self._model = model
        self._ledger = model.ledger
        self._group = model.world.default_group
        self._clock = clock
        self._clock_name = clock_name
        self._recorder: SpanRecorder | None = None
        self._has_profiler = profiler
        self._operators: OperatorRecorder | None = None
        self._readings: list[ClockReading] = []
        self._first_traced = 0

    def begin(self) -> None:
        """Compare clocks, and record from now on.

        Raises:
            ApplyError: Steps are being recorded already, or torch.profiler runs where it is to be added.
            LostPeerError: A peer is gone.
        """
        if self._ledger.recorder is not None:
            raise ApplyError("steps are being recorded already", fix="end that trace first")
        if self._has_profiler:
            self._start_operators()
        try:
            self._readings = [self._read_clocks()]
        except BaseException:
            self.stop()
            raise
        self._first_traced = self._model.num_steps + 1
        self._recorder = self._ledger.recorder = SpanRecorder(self._clock)
        self._recorder.note_thread()  # the one that computes comes first

    def _start_operators(self) -> None:
        """Start torch.profiler on all ranks, or on none: those that it runs on would wait for the others otherwise."""
        operators, failure = None, None
        try:
            operators = OperatorRecorder(self._clock, self._model.world.device, MOST_OPERATORS // self._group.size)
        except ApplyError as error:
            failure = error
        has_failed = torch.tensor([failure is not None], dtype=torch.int32, device=self._device)
        with self._ledger.of_checks():
            self._group.all_reduce(has_failed, "max")
        if operators is None or int(has_failed):
            raise failure or ApplyError(
                "torch.profiler runs already on another rank (rule: one at a time)", fix="trace without `profiler`"
            )
        operators.start()
        self._operators = operators

    def stop(self) -> None:
        """Stop recording; nothing is exchanged."""
        self._ledger.recorder = None
        operators, self._operators = self._operators, None
        if operators is not None:
            operators.drop()

    def end(self, about: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Stop recording, and return the trace on rank 0, None on the others.

        Args:
            about: Further plain data for the trace's `otherData`.

        Raises:
            LostPeerError: A peer is gone.
        """
        operators, self._operators = self._operators, None
        self.stop()
        found = None if operators is None else operators.stop()
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        self._readings.append(self._read_clocks())
        mine = RankSpans(
            rank=self._group.rank,
            threads=recorder.threads,
            spans=[(one[0], str(one[1]), *one[2:5], plain_details(one[5])) for one in recorder.spans],
            flights=[
                (one.name, one.begin, one.end, one.thread, plain_details(one.details) or {}) for one in recorder.flights
            ],
            clock=[(one.at_ns, one.offset_ns, one.error_ns) for one in self._readings],
            num_left_out=recorder.num_left_out,
            operators=found,
        )
        with self._ledger.of_checks():
            ranks = _gather(self._group, self._device, mine)
        if ranks is None:
            return None
        last = self._model.num_steps
        facts: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "plan": str(self._model.plan),
            "steps": list(range(self._first_traced, last + 1)),
            "device": self._model.world.device.type,
            "num_ranks": self._group.size,
        }
        return chrome_trace(ranks, facts | (about or {}))

    def _read_clocks(self) -> ClockReading:
        with self._ledger.of_checks():
            return read_clocks(self._group, self._device, clock=self._clock, name=self._clock_name or clock_name())

    @property
    def _device(self) -> torch.device:
        group = self._group.process_group
        has_cpu = group is not None and bool(cpu_backend_name(group))
        return torch.device("cpu") if has_cpu else self._model.world.device


@contextlib.contextmanager
def trace_steps(model: ParallelModel, path: str | Path, *, profiler: bool = False) -> Iterator[None]:
    """Record the steps taken inside the context, on all ranks, and write them as a Chrome trace; every rank enters it.

    The file opens in https://ui.perfetto.dev and in chrome://tracing: forward and backward of each micro-batch, exchanges with
    bytes and ranks, and waiting, of all ranks on one clock. Rank 0 writes it when the context ends. An exception inside leaves
    no file.

    Args:
        model: The model.
        path: The file; one that is there is replaced.
        profiler: Whether torch.profiler's operators of all threads, and kernels of a GPU, are added, on tracks of their own.
            They make the steps longer.

    Raises:
        ApplyError: Steps are being recorded already, or torch.profiler runs where it is to be added.
        LostPeerError: A peer is gone.
        StorageError: The file cannot be written.
    """
    trace = StepTrace(model, profiler=profiler)
    trace.begin()
    try:
        yield
    except BaseException:
        trace.stop()
        raise
    found = trace.end()
    if found is not None:
        write_trace(found, Path(path))


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """Write a trace; a reader sees the old file or the new one, never a part.

    Raises:
        StorageError: The disk is full or gone.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    write_new_file(partial, [json.dumps(trace, separators=(",", ":")).encode(), b"\n"])
    with told_of(path, "rename"):
        partial.replace(path)


def _gather(group: Communicator, device: torch.device, mine: RankSpans) -> list[RankSpans] | None:
    """Return what all ranks have, on rank 0; None on the others. One after the other: rank 0 holds what it needs."""
    if group.group_rank > 0:
        data = torch.frombuffer(bytearray(zlib.compress(mine.to_json().encode(), 1)), dtype=torch.uint8).to(device)
        group.send(torch.tensor([data.numel()], dtype=torch.int64, device=device), 0, _TAG).wait()
        for piece in data.split(_PIECE_BYTES):
            group.send(piece, 0, _TAG).wait()
        return None
    found = [mine]
    for source in range(1, group.size):
        length = torch.zeros(1, dtype=torch.int64, device=device)
        group.receive(length, source, _TAG)
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
        for piece in data.split(_PIECE_BYTES):
            group.receive(piece, source, _TAG)
        found.append(RankSpans.from_json(zlib.decompress(bytes(data.cpu().numpy())).decode()))
    return found
