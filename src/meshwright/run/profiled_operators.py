"""Operators of traced steps: torch.profiler's events of one rank, on that rank's own clock (ADR 0026)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, record_function

from meshwright._torch_private import new_profiler
from meshwright.errors import ApplyError
from meshwright.spec.timeline import RankOperators

__all__: list[str] = []

MOST_OPERATORS: Final = 400_000
"""Operators that one trace keeps, over all ranks; further ones are counted [count]."""
_MARK: Final = "meshwright.clock"
_NUM_MARKS: Final = 5
"""Comparisons of the two clocks at each end; that in the shortest time counts [count]."""
_QUIET: Final = ("KINETO_LOG_LEVEL", "6")
"""Environment variable of torch's profiler, and the value at which it prints nothing."""


class OperatorRecorder:
    """Runs torch.profiler on one rank, over all threads of the process.

    torch.profiler has a clock of its own. It is compared with the rank's at both ends, by marks whose begin lies between two
    readings of the rank's clock; in between the offset moves evenly.

    Args:
        clock: The rank's clock [ns].
        device: The rank's device; kernels are recorded where it is a GPU.
        most: Operators that are kept; the earliest ones [count].
    """

    def __init__(self, clock: Callable[[], int], device: torch.device, most: int) -> None:
        self._clock = clock
        self._most = most
        activities = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if device.type == "cuda" else set())
        profiler = new_profiler(activities)
        if profiler is None:
            raise ApplyError(
                "torch.profiler runs already in this process (rule: one at a time)", fix="trace without `profiler`"
            )
        self._profiler = profiler
        self._marks: list[tuple[int, int]] = []
        """Before and inside of each mark, on the rank's clock [ns]."""

    def start(self) -> None:
        """Record from now on."""
        with _without_messages():
            self._profiler.start()
        self._mark()

    def stop(self) -> RankOperators:
        """Stop, and return what was recorded."""
        self._mark()
        self.drop()
        return self._read(list(self._profiler.events() or []))

    def drop(self) -> None:
        """Stop; what was recorded is not read."""
        with _without_messages():
            self._profiler.stop()

    def _mark(self) -> None:
        for _ in range(_NUM_MARKS):
            before = self._clock()
            with record_function(_MARK):
                self._marks.append((before, self._clock()))

    def _read(self, events: list[Any]) -> RankOperators:
        begins = sorted(event.time_range.start for event in events if event.name == _MARK and _is_of_host(event))
        clock = _compare(begins, self._marks)
        wanted = [event for event in events if event.name != _MARK and not event.is_async and _is_wanted(event)]
        wanted.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        names = _thread_names()
        tracks: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
        for event in wanted[: self._most]:
            times = event.time_range
            tracks[_track_of(event, names)].append((event.name, round(times.start * 1e3), round(times.end * 1e3)))
        return RankOperators(
            tracks={track: _nested(found) for track, found in tracks.items()},
            clock=clock,
            num_left_out=max(0, len(wanted) - self._most),
        )


def _compare(begins: list[float], marks: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return readings at both ends: the profiler's time, the rank's clock less it, half of the time in between [ns]."""
    if len(begins) != len(marks):
        raise ApplyError("torch.profiler has lost the marks that compare its clock", fix="trace without `profiler`")
    readings = [
        (round(begin * 1e3), (before + inside) // 2 - round(begin * 1e3), (inside - before + 1) // 2)
        for begin, (before, inside) in zip(begins, marks, strict=True)
    ]
    ends = readings[:_NUM_MARKS], readings[-_NUM_MARKS:]
    return [min(end, key=lambda reading: reading[2]) for end in ends]


def _nested(spans: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return spans of one track, of which none sticks out of the one that it begins in: readers drop those that do."""
    open_ends: list[int] = []
    found: list[tuple[str, int, int]] = []
    for name, begin, end in spans:
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        end = min(end, open_ends[-1]) if open_ends else end
        open_ends.append(end)
        found.append((name, begin, end))
    return found


def _is_of_host(event: Any) -> bool:
    return event.device_type.name == "CPU"


def _is_wanted(event: Any) -> bool:
    # A GPU's copies of the host's annotations lie across its kernels.
    return _is_of_host(event) or not event.is_user_annotation


def _track_of(event: Any, names: dict[int, str]) -> str:
    if not _is_of_host(event):
        return f"kernels of GPU {event.device_index}, stream {event.device_resource_id}"
    return f"operators of {names.get(event.device_resource_id, f'thread {event.thread}')}"


def _thread_names() -> dict[int, str]:
    """Return the system's id of each thread -> its name; that of the calling one is "computing"."""
    found = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}
    return found | {threading.get_native_id(): "computing"}


@contextlib.contextmanager
def _without_messages() -> Generator[None]:
    """Have torch's profiler print nothing inside the context, unless the user has asked for more or less."""
    name, value = _QUIET
    is_ours = name not in os.environ
    if is_ours:
        os.environ[name] = value
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(name, None)
