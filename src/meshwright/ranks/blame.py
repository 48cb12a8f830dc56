"""Blame: the one error to raise, from all signs that a group of ranks is broken."""

from __future__ import annotations

import dataclasses
import signal

from meshwright.errors import WorkerKilledError
from meshwright.host import MemoryGroup
from meshwright.ranks.heartbeat import Beat

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
    """Return the sign of the cause: first-hand before second-hand, then the earliest."""
    return min(signs, key=lambda sign: (sign.secondary, sign.at, sign.rank))


def death_error(
    rank: int, world_size: int, pid: int, *, signal_number: int | None, status: int | None, beat: Beat
) -> WorkerKilledError:
    """Return the error for a rank that ended before its work was done."""
    who = f"rank {rank} of {world_size} (pid {pid})"
    if signal_number is None:
        what = "its status is unknown" if status is None else f"status {status}"
        return WorkerKilledError(
            f"{who} left before its work was done ({what}), at {beat.where()}",
            rank=rank,
            exit_status=status,
            step=beat.known_step,
            phase=beat.phase,
            fix="look for os._exit() or a library that ends the process; return from the function instead",
        )
    name = _signal_name(signal_number)
    memory = _memory_hint(beat) if signal_number == signal.SIGKILL else ""
    return WorkerKilledError(
        f"{who} was killed by {name} at {beat.where()}{memory}",
        rank=rank,
        signal_name=name,
        step=beat.known_step,
        phase=beat.phase,
        fix="use less memory per rank: smaller micro-batches, recompute, a higher zero stage" if memory else None,
    )


def template_error(rank: int, world_size: int, template_pid: int, how: str) -> WorkerKilledError:
    """Return the error for a rank that died because the process it was forked from had died."""
    return WorkerKilledError(
        f"the process that the {world_size} ranks were forked from (pid {template_pid}) {how}, and they were killed with it",
        rank=rank,
        signal_name="SIGKILL",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _memory_hint(beat: Beat) -> str:
    """Return a remark if the kernel killed for lack of memory, or the rank was near its limit; else ""."""
    limit = beat.memory_limit_bytes
    kills = MemoryGroup(beat.memory_group, limit).num_oom_kills() if beat.memory_group else -1
    killed = kills > beat.num_oom_kills >= 0
    near = bool(limit) and beat.rss_bytes > _NEAR_LIMIT_FRACTION * limit
    if not killed and not near:
        return ""
    of = f" of limit {limit / 2**30:.2f} GiB" if limit else ""
    return f"; likely out of memory: resident {beat.rss_bytes / 2**30:.2f} GiB{of}"


def summarise(signs: list[Sign]) -> str:
    """Return one line on the other ranks' reports, "" where there is nothing to add."""
    chosen = guilty(signs)
    others = sorted({sign.rank for sign in signs if sign is not chosen and sign.rank != chosen.rank})
    if not others:
        return ""
    names = ", ".join(str(rank) for rank in others)
    return f"{'ranks' if len(others) > 1 else 'rank'} {names} failed after it"
