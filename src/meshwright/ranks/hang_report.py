"""Report on ranks that wait or do not react: what each of them is doing, and the error for it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from meshwright.errors import LostPeerError, StoppedOnRequest
from meshwright.ranks.heartbeat import Board
from meshwright.ranks.processes import RankProcess

__all__: list[str] = []

_DUMP_PATIENCE_S = 0.5
_TICK_S = 0.02

# A real-time signal, since users and cluster managers use SIGUSR1 and SIGUSR2.
STACK_SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


def hang_error(ranks: list[RankProcess], board: Board, number: int, now: float, timeout_s: float) -> LostPeerError:
    """Return the error for a rank that has waited beyond the limit.

    Args:
        ranks: All ranks.
        board: Their records.
        number: The rank that has waited longest.
        now: The time, `time.monotonic()` [s].
        timeout_s: The limit [s].
    """
    beats = [board.read(rank.rank) for rank in ranks]
    beat = beats[number]
    doing = _doing(ranks, board)
    absent = [other for other, its in enumerate(beats) if not its.is_waiting]
    lines = [
        f"rank {number} of {len(beats)} has waited {now - beat.waiting_since:.1f} s in {beat.collective} "
        f"(wait number {beat.num_entered}) at {beat.where()}; the limit is {timeout_s:g} s",
    ]
    for other, its in enumerate(beats):
        state = (
            f"waits in {its.collective} for {now - its.waiting_since:.1f} s"
            if its.is_waiting
            else f"is in no collective, last progress {now - its.progress_at:.1f} s ago"
        )
        lines.append(f"  rank {other} {state}; {its.where()}, {its.num_entered} waits begun; {doing[other]}")
    return LostPeerError(
        "\n".join(lines),
        rank=number,
        peer=absent[0] if len(absent) == 1 else None,
        step=beat.known_step,
        phase=beat.phase,
        fix="make every rank call the same collectives in the same order, or raise timeout_s if the work is that slow",
    )


def unheeded_stop_error(ranks: list[RankProcess], board: Board, asked_by: str, grace_s: float) -> StoppedOnRequest:
    """Return the error for ranks that were asked to stop and did not end."""
    late = [rank for rank in ranks if not rank.is_accounted]
    lines = [f"{asked_by} asked for a stop; all ranks were killed {grace_s:g} s later, since these had not ended:"]
    return StoppedOnRequest(
        "\n".join(lines + _lines_about(late, board)),
        fix="poll world.stop_requested() in the loop, or raise stop_grace_s",
    )


def late_start_error(ranks: list[RankProcess], board: Board, patience_s: float) -> LostPeerError:
    """Return the error for ranks that have not found each other in time."""
    late = [rank for rank in ranks if not rank.is_ready]
    names = ", ".join(str(rank.rank) for rank in late)
    lines = [f"{'ranks' if len(late) > 1 else 'rank'} {names} of {len(ranks)} did not start within {patience_s:g} s:"]
    return LostPeerError(
        "\n".join(lines + _lines_about(late, board)),
        peer=late[0].rank,
        fix="raise start_timeout_s if the machine is that busy",
    )


def _lines_about(ranks: list[RankProcess], board: Board) -> list[str]:
    doing = _doing(ranks, board)
    return [f"  rank {rank.rank}, {board.read(rank.rank).where()}; {doing[rank.rank]}" for rank in ranks]


def _doing(ranks: list[RankProcess], board: Board) -> dict[int, str]:
    """Return the position of each rank's main thread, for ranks that answer within half a second."""
    texts: dict[int, str] = {}
    for rank in ranks:
        rank.read_stack()
        if rank.has_died:
            texts[rank.rank] = "it has ended"
        elif rank.state_letter() in ("T", "t"):
            texts[rank.rank] = "it is stopped (SIGSTOP)"
        elif rank.is_born and board.read(rank.rank).phase not in ("", "start"):
            # Before that the signal would kill the rank, its default action.
            with contextlib.suppress(OSError):
                os.kill(rank.pid, STACK_SIGNAL)
    deadline = time.monotonic() + _DUMP_PATIENCE_S
    while len(texts) < len(ranks) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
        for rank in ranks:
            if rank.rank not in texts and (text := rank.read_stack()):
                texts[rank.rank] = "\n    ".join(["it stands in:", *_users_lines(text)])
    return {rank.rank: texts.get(rank.rank, "it gives no sign of life") for rank in ranks}


def _users_lines(stack: str) -> list[str]:
    """Return a stack dump's lines down to the user's function, without those of this package's worker."""
    lines = []
    for line in stack.splitlines()[1:]:
        if "meshwright/ranks/worker.py" in line:
            break
        lines.append(line.strip())
    return lines or ["the worker, which waits for a call"]
