"""Who is guilty: from the signs that a group of ranks is broken, the one error to raise."""

from __future__ import annotations

import dataclasses
import pickle
import signal
from typing import Any

from meshwright.comm.heartbeat import Beat
from meshwright.comm.limits import MemoryGroup
from meshwright.errors import LostPeerError, UserCodeError, WorkerKilledError

__all__: list[str] = []

_NEAR_LIMIT_FRACTION = 0.9


@dataclasses.dataclass(frozen=True, slots=True)
class Sign:
    """One sign that a rank is broken."""

    rank: int
    at: float
    """When it happened, on the clock `time.monotonic` that all processes of a host share [s]."""
    secondary: bool
    """Whether it may be a consequence: "connection closed by peer" never counts as a cause."""
    error: BaseException


def guilty(signs: list[Sign]) -> Sign:
    """Return the sign that is the cause: first-hand before second-hand, then the earliest."""
    return min(signs, key=lambda sign: (sign.secondary, sign.at, sign.rank))


def rebuild_error(info: dict[str, Any], rank: int, world_size: int) -> BaseException:
    """Return a rank's exception: the object itself where it survives the way here, else a `UserCodeError`.

    Args:
        info: What the rank sent, see `describe_error` in worker.py.
        rank: The rank that raised.
        world_size: Number of ranks [count].
    """
    traceback_text = info["traceback"]
    error = _unpickled(info)
    if error is None:
        return UserCodeError(
            f"rank {rank} of {world_size} raised {info['type']}: {info['text']}\n\n{traceback_text}",
            rank=rank,
            traceback_text=traceback_text,
        )
    error.add_note(f"rank {rank} of {world_size}; its traceback:\n{traceback_text}")
    return error


def _unpickled(info: dict[str, Any]) -> Exception | None:
    if info["pickled"] is None:
        return None
    try:
        error = pickle.loads(info["pickled"])  # noqa: S301 - from our own rank, over the private channel
        same = isinstance(error, Exception) and str(error) == info["text"]
    except Exception:  # noqa: BLE001 - rebuilding runs the class's own code, which may raise anything
        return None
    return error if same else None


def death_error(
    rank: int, world_size: int, pid: int, *, signal_number: int | None, status: int | None, beat: Beat
) -> WorkerKilledError:
    """Return the error for a rank that is gone before its work was done."""
    who = f"rank {rank} of {world_size} (pid {pid})"
    if signal_number is None:
        what = "its status is unknown" if status is None else f"status {status}"
        return WorkerKilledError(
            f"{who} left before its work was done ({what}), at {beat.where()}",
            rank=rank,
            exit_status=status,
            fix="look for os._exit() or a library that ends the process; return from the function instead",
        )
    name = _signal_name(signal_number)
    memory = _memory_hint(beat) if signal_number == signal.SIGKILL else ""
    return WorkerKilledError(
        f"{who} was killed by {name} at {beat.where()}{memory}",
        rank=rank,
        signal_name=name,
        fix="use less memory per rank: smaller micro-batches, recompute, a higher zero stage" if memory else None,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _memory_hint(beat: Beat) -> str:
    """Return a remark where the kernel killed for want of memory, or the rank was close to its limit; else ""."""
    limit = beat.memory_limit_bytes
    kills = MemoryGroup(beat.memory_group, limit).num_oom_kills() if beat.memory_group else -1
    killed = kills > beat.num_oom_kills >= 0
    near = bool(limit) and beat.rss_bytes > _NEAR_LIMIT_FRACTION * limit
    if not killed and not near:
        return ""
    of = f" of limit {limit / 2**30:.2f} GiB" if limit else ""
    return f"; likely out of memory: resident {beat.rss_bytes / 2**30:.2f} GiB{of}"


def hang_error(rank: int, beats: list[Beat], doing: list[str], now: float, timeout_s: float) -> LostPeerError:
    """Return the error for a rank that has waited longer than it may.

    Args:
        rank: The rank that has waited longest.
        beats: All ranks' records.
        doing: For each rank, what it is doing, as text that may span lines.
        now: The time, `time.monotonic()` [s].
        timeout_s: The limit [s].
    """
    beat = beats[rank]
    absent = [other for other, its in enumerate(beats) if not its.is_waiting]
    lines = [
        f"rank {rank} of {len(beats)} has waited {now - beat.waiting_since:.1f} s in {beat.collective} "
        f"(its {beat.num_entered}th exchange) at {beat.where()}; the limit is {timeout_s:g} s",
    ]
    for other, its in enumerate(beats):
        state = (
            f"waits in {its.collective} for {now - its.waiting_since:.1f} s"
            if its.is_waiting
            else f"is in no collective, last progress {now - its.progress_at:.1f} s ago"
        )
        lines.append(f"  rank {other} {state}; {its.where()}, {its.num_entered} exchanges begun; {doing[other]}")
    return LostPeerError(
        "\n".join(lines),
        rank=rank,
        peer=absent[0] if len(absent) == 1 else None,
        fix="make every rank call the same collectives in the same order, or raise timeout_s if the work is that slow",
    )


def summarise(signs: list[Sign]) -> str:
    """Return one line on what the other ranks reported, "" where there is nothing to add."""
    chosen = guilty(signs)
    others = sorted({sign.rank for sign in signs if sign is not chosen and sign.rank != chosen.rank})
    if not others:
        return ""
    names = ", ".join(str(rank) for rank in others)
    return f"{'ranks' if len(others) > 1 else 'rank'} {names} failed after it"
