"""Heartbeat: a record of what each rank is doing, in memory shared by the launching process and all ranks.

Each rank writes one record: step, phase, the collective it waits in and since when, its memory. A write takes about a microsecond
and no system call, so it is done at every collective. The record survives the rank's death, so an error can say what a rank was
doing when it was killed.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
import threading
import time

__all__: list[str] = []

RECORD_BYTES = 512

# A record has four parts at fixed offsets, so that writers of one part do not touch another.
_PROGRESS = struct.Struct("<qd32s")  # step, when, phase
_WAITING = struct.Struct("<dQQ32s")  # since (0: not waiting), collectives entered, left, name
_MEMORY = struct.Struct("<QQq")  # resident bytes, limit bytes (0: none), out-of-memory kills seen
_GROUP = struct.Struct("<256s")  # path of the memory control group's directory
_PROGRESS_AT = 0
_WAITING_AT = 64
_MEMORY_AT = 128
_GROUP_AT = 192


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """One rank's activity when its record was read. Times are `time.monotonic()` [s]."""

    step: int
    phase: str
    progress_at: float
    waiting_since: float
    collective: str
    num_entered: int
    num_left: int
    rss_bytes: int
    memory_limit_bytes: int
    num_oom_kills: int
    memory_group: str

    @property
    def is_waiting(self) -> bool:
        """Whether it waits in a collective."""
        return self.waiting_since > 0.0

    @property
    def known_step(self) -> int | None:
        """The step that it is in; None before the first."""
        return None if self.step < 0 else self.step

    def where(self) -> str:
        """Return "step 3, phase backward", or only the phase before the first step."""
        return f"phase {self.phase}" if self.step < 0 else f"step {self.step}, phase {self.phase}"


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="replace")


class Board:
    """All ranks' records.

    Args:
        descriptor: A file of at least `num_ranks * RECORD_BYTES` bytes.
        num_ranks: How many ranks share it [count].
    """

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._memory = mmap.mmap(descriptor, num_ranks * RECORD_BYTES)

    def read(self, rank: int) -> Beat:
        """Return a rank's last record. Text may be torn for an instant; numbers are whole."""
        base = rank * RECORD_BYTES
        step, progress_at, phase = _PROGRESS.unpack_from(self._memory, base + _PROGRESS_AT)
        since, entered, left, name = _WAITING.unpack_from(self._memory, base + _WAITING_AT)
        rss, limit, kills = _MEMORY.unpack_from(self._memory, base + _MEMORY_AT)
        (group,) = _GROUP.unpack_from(self._memory, base + _GROUP_AT)
        return Beat(
            step=step,
            phase=_text(phase),
            progress_at=progress_at,
            waiting_since=since,
            collective=_text(name),
            num_entered=entered,
            num_left=left,
            rss_bytes=rss,
            memory_limit_bytes=limit,
            num_oom_kills=kills,
            memory_group=_text(group),
        )

    def write(self, rank: int, offset: int, packed: bytes) -> None:
        """Put packed bytes into a rank's record."""
        start = rank * RECORD_BYTES + offset
        self._memory[start : start + len(packed)] = packed

    def place_of_waiting(self, rank: int) -> tuple[mmap.mmap, slice]:
        """Return the memory, and where in it a rank says what it waits in: it is written there at every collective."""
        start = rank * RECORD_BYTES + _WAITING_AT
        return self._memory, slice(start, start + _WAITING.size)

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


class Pulse:
    """The writing side of one rank's record."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._lock = threading.Lock()
        self._depth = 0
        self._entered = 0
        self._left = 0
        self._memory, self._waiting_at = board.place_of_waiting(rank)
        self._names: dict[str, bytes] = {}
        self.progress(-1, "start")

    def progress(self, step: int, phase: str) -> None:
        """Record the rank's step and phase; step -1 is "before the first"."""
        packed = _PROGRESS.pack(step, time.monotonic(), phase.encode()[:31])
        self._board.write(self._rank, _PROGRESS_AT, packed)

    def enter(self, name: str) -> None:
        """Record that a thread starts waiting in a collective."""
        with self._lock:
            self._depth += 1
            self._entered += 1
            if self._depth == 1:
                written = self._names.get(name) or self._names.setdefault(name, name.encode()[:31])
                packed = _WAITING.pack(time.monotonic(), self._entered, self._left, written)
                self._memory[self._waiting_at] = packed

    def leave(self) -> None:
        """Record that a thread has stopped waiting."""
        with self._lock:
            self._depth -= 1
            self._left += 1
            if self._depth == 0:
                self._memory[self._waiting_at] = _WAITING.pack(0.0, self._entered, self._left, b"")

    def memory(self, rss_bytes: int, limit_bytes: int, num_oom_kills: int) -> None:
        """Record the rank's memory and its limit."""
        packed = _MEMORY.pack(rss_bytes, limit_bytes, num_oom_kills)
        self._board.write(self._rank, _MEMORY_AT, packed)

    def memory_group(self, path: str) -> None:
        """Record the directory of the control group that limits the rank's memory."""
        self._board.write(self._rank, _GROUP_AT, _GROUP.pack(path.encode()[:255]))
