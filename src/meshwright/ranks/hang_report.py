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

_DUMP_PATIENCE_S = 1.0
_TICK_S = 0.02

STOPPED = ("T", "t")
"""State letters of a process that was stopped: by a signal, by a debugger."""
_FIX_STOPPED = "find what has stopped that process: a debugger, a shell's job control, a scheduler that suspends jobs"
_OWN_THREADS = ("worker", "watchdog")
# A real-time signal, since users and cluster managers use SIGUSR1 and SIGUSR2.
STACK_SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


def hang_error(
    ranks: list[RankProcess], board: Board, number: int, now: float, timeout_s: float, *, goes_on: bool = False
) -> LostPeerError:
    """Return the error for a rank that has waited beyond the limit.

    Args:
        ranks: All ranks.
        board: Their records.
        number: The rank that has waited longest.
        now: The time, `time.monotonic()` [s].
        timeout_s: The limit [s].
        goes_on: Whether the ranks live on: then only their main threads are asked. To write down the stacks of others, which
            run meanwhile, may end the process (SIGSEGV), since faulthandler holds no lock.
    """
    beats = [board.read(rank.rank) for rank in ranks]
    doing = _doing(ranks, board, others=not goes_on)
    # A rank that was stopped inside of an exchange seems to wait, as its peers do.
    stopped = stopped_ranks(ranks)
    waiting = [other for other, its in enumerate(beats) if its.is_waiting and other not in stopped]
    if number in stopped and waiting:
        number = min(waiting, key=lambda other: beats[other].waiting_since)
    beat = beats[number]
    absent = [other for other, its in enumerate(beats) if not its.is_waiting]
    missing = stopped[:1] or absent
    lines = [
        f"rank {number} of {len(beats)} has waited {now - beat.waiting_since:.1f} s in {beat.collective} "
        f"(wait number {beat.num_entered}) at {beat.where()}; the limit is {timeout_s:g} s{_stopped_text(stopped)}",
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
        peer=missing[0] if len(missing) == 1 else None,
        step=beat.known_step,
        phase=beat.phase,
        fix=_FIX_STOPPED
        if stopped
        else "make every rank call the same collectives in the same order, or raise timeout_s if the work is that slow",
    )


def standstill_error(
    ranks: list[RankProcess], board: Board, number: int, now: float, timeout_s: float
) -> LostPeerError:
    """Return the error for ranks none of which comes on, or waits for another.

    Args:
        ranks: All ranks.
        board: Their records.
        number: The rank that has stood still for longest.
        now: The time, `time.monotonic()` [s].
        timeout_s: The limit [s].
    """
    beat = board.read(number)
    quiet_s = now - beat.progress_at
    still = f"rank {number} of {board.num_ranks} has not come on for {quiet_s:.1f} s"
    stopped = stopped_ranks(ranks)
    head = f"{still}, and waits for no other rank; the limit is {timeout_s:g} s{_stopped_text(stopped)}"
    return LostPeerError(
        "\n".join([head, *lines_about(ranks, board)]),
        rank=number,
        peer=number,
        step=beat.known_step,
        phase=beat.phase,
        fix=_FIX_STOPPED if stopped else "see where it stands, or raise timeout_s if the work is that slow",
    )


def stopped_ranks(ranks: list[RankProcess]) -> list[int]:
    """Return the ranks that a signal or a debugger has stopped."""
    return [rank.rank for rank in ranks if not rank.has_died and rank.state_letter() in STOPPED]


def _stopped_text(stopped: list[int]) -> str:
    names = ", ".join(map(str, stopped[:8])) + (f" and {len(stopped) - 8} more" if len(stopped) > 8 else "")
    return f"; stopped by SIGSTOP or a debugger: rank{'s' * (len(stopped) > 1)} {names}" if stopped else ""


def unheeded_stop_error(ranks: list[RankProcess], board: Board, asked_by: str, grace_s: float) -> StoppedOnRequest:
    """Return the error for ranks that were asked to stop and did not end."""
    late = [rank for rank in ranks if not rank.is_accounted]
    lines = [f"{asked_by} asked for a stop; all ranks were killed {grace_s:g} s later, since these had not ended:"]
    return StoppedOnRequest(
        "\n".join(lines + lines_about(late, board)),
        fix="poll world.stop_requested() in the loop, or raise stop_grace_s",
    )


def late_start_error(ranks: list[RankProcess], board: Board, patience_s: float) -> LostPeerError:
    """Return the error for ranks that have not found each other in time."""
    late = [rank for rank in ranks if not rank.is_ready]
    names = ", ".join(str(rank.rank) for rank in late)
    lines = [f"{'ranks' if len(late) > 1 else 'rank'} {names} of {len(ranks)} did not start within {patience_s:g} s:"]
    return LostPeerError(
        "\n".join(lines + lines_about(late, board)),
        peer=late[0].rank,
        fix="raise start_timeout_s if the machine is that busy",
    )


def lines_about(ranks: list[RankProcess], board: Board, *, goes_on: bool = False) -> list[str]:
    """Return a line for each of these ranks: its step and phase, and where its threads stand (the main one, where it goes on)."""
    doing = _doing(ranks, board, others=not goes_on)
    return [f"  rank {rank.rank}, {board.read(rank.rank).where()}; {doing[rank.rank]}" for rank in ranks]


def _doing(ranks: list[RankProcess], board: Board, *, others: bool = True) -> dict[int, str]:
    """Return where each rank's main thread stands, and its `others`, for ranks that answer within a second."""
    texts: dict[int, str] = {}
    asked: dict[int, int] = {}
    for rank in ranks:
        rank.read_stack()
        if rank.has_died:
            texts[rank.rank] = "it has ended"
        elif rank.state_letter() in STOPPED:
            texts[rank.rank] = "it is stopped (SIGSTOP)"
        elif rank.is_born and board.read(rank.rank).phase not in ("", "start"):
            # Before that the signal would kill the rank, its default action.
            asked[rank.rank] = STACK_SIGNAL
            _ask(rank, STACK_SIGNAL)
    deadline = time.monotonic() + _DUMP_PATIENCE_S
    sizes = dict.fromkeys(asked, 0)
    dumps: dict[int, str] = {}
    while asked and time.monotonic() < deadline:
        time.sleep(_TICK_S)
        for rank in [rank for rank in ranks if rank.rank in asked]:
            before, sizes[rank.rank] = sizes[rank.rank], rank.stack_size()
            if not 0 < sizes[rank.rank] == before:  # not all of it has been written
                continue
            dumps[rank.rank] = dumps.get(rank.rank, "") + rank.read_stack() + "\n"
            sizes[rank.rank] = 0
            if others and asked[rank.rank] == STACK_SIGNAL:
                asked[rank.rank] = STACK_SIGNAL + 1
                _ask(rank, STACK_SIGNAL + 1)
            else:
                del asked[rank.rank]
    texts |= {number: "\n    ".join(["it stands in:", *_users_lines(dump)]) for number, dump in dumps.items()}
    return {rank.rank: texts.get(rank.rank, "it gives no sign of life") for rank in ranks}


def _ask(rank: RankProcess, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(rank.pid, number)


def _users_lines(dump: str) -> list[str]:
    """Return the lines of a dump down to the user's functions: of the main thread first, then of others.

    Threads of the worker's own, and the lines of its loop, are left out.

    Args:
        dump: The main thread, and then up to a hundred threads, the main one perhaps among them.
    """
    own, _, everyone = dump.replace("\nCurrent thread 0x", "\nThread 0x").partition("\nThread 0x")
    lines = _down_to_the_worker([line.strip() for line in own.splitlines()[1:]])
    lines = lines or ["the worker, which waits for a call"]
    for thread in everyone.split("\n\n"):
        other = [line.strip() for line in thread.splitlines()[1:]]
        if other and not any(f"meshwright/ranks/{name}.py" in line for line in other for name in _OWN_THREADS):
            lines += ["and another thread in:", *other]
    return lines


def _down_to_the_worker(lines: list[str]) -> list[str]:
    return lines[
        : next((place for place, line in enumerate(lines) if "meshwright/ranks/worker.py" in line), len(lines))
    ]
