"""Runs one program: the plain loop here, the plan on ranks of a pool, and the verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks.fuzz import candidate, verdict
from benchmarks.fuzz.oracle import run_plain
from benchmarks.fuzz.verdict import Verdict

from meshwright import testing
from meshwright.testing import pool

_GRACE_S = 15.0


class DeadlineError(TimeoutError):
    """A program took longer than its deadline, in whatever it was."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError in the main thread after this time, also where ranks compute for ever."""

    def late(*_: Any) -> None:
        raise DeadlineError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def set_timeout(seconds: float) -> None:
    """Let ranks wait no longer than this for one another; groups that are started from now on take it."""
    pool._TIMEOUT_S = seconds


def drop_group(num_ranks: int) -> None:
    """Let the next call with this many ranks start fresh ones, from the processes that are kept for that."""
    group = pool._POOL._groups.pop(num_ranks, None)
    pool._POOL._pids.pop(num_ranks, None)
    if group is not None:
        group.close()


def start_ranks(num_ranks: int) -> None:
    """Have ranks there before a program's time begins to run: under load their start takes as long as many programs."""
    if num_ranks not in pool._POOL._groups:
        testing.run_outcomes(os.getpid, num_ranks)


def plain_records(program: dict[str, Any]) -> list[dict[str, Any]] | str:
    """Return what the plain loop recorded, or the text of what it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            records = run_plain(program)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    losses = [record[key] for record in records for key in ("loss", "norm") if key in record]
    if not all(abs(value) < 1e8 for value in losses):
        return f"not finite, or too large to compare: {losses[:6]}"
    return records


def run_program(program: dict[str, Any], timeout_s: float = 20.0) -> tuple[Verdict, float]:
    """Run a program and return its verdict and how long it took [s]."""
    start = time.perf_counter()
    reference = plain_records(program)
    if isinstance(reference, str):
        return Verdict("invalid", reference), time.perf_counter() - start
    begin_of_ranks = time.perf_counter()
    set_timeout(timeout_s)
    start_ranks(program["ranks"])
    begin = time.perf_counter()
    try:
        with deadline(timeout_s + _GRACE_S):
            outcomes = testing.run_outcomes(candidate.run_under_plan, program["ranks"], program)
        ranks: Any = [outcome.result for outcome in outcomes]
        broken = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        ranks = ranks if broken is None else broken
    except Exception as error:
        ranks = error  # the pool has thrown that group away
    if not isinstance(ranks, BaseException) and any(rank["error"] and rank["error"]["is_hang"] for rank in ranks):
        drop_group(program["ranks"])  # ranks that gave up waiting are in no known state
    seconds = begin_of_ranks - start + time.perf_counter() - begin
    if program["pieces"] and not isinstance(ranks, BaseException) and any(rank["joined"] for rank in ranks):
        # Ranks that join their shares, and pipelines that join micro-batches, compute what one device does, on the whole batch.
        program = program | {"pieces": False}
        reference = plain_records(program)
        if isinstance(reference, str):
            return Verdict("invalid", reference), seconds
    is_random = program.get("random", False)
    found = verdict.judge(
        reference,
        ranks,
        candidate.describe_error,
        is_random=is_random,
        draws_apart=is_random and program["degree"] > 1,
    )
    if found.kind == "wrong" and found.largest < verdict.SMALL and "against rank 0" not in found.detail:
        found = _unless_rounding(program, reference, ranks, found)
    return found, seconds


def _unless_rounding(
    program: dict[str, Any], reference: list[dict[str, Any]], ranks: list[dict[str, Any]], found: Verdict
) -> Verdict:
    """Return the verdict, or equal where the plain loop moves as far when the last bits of its parameters do."""
    if any(rank["error"] for rank in ranks):
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = [run_plain(program, seed) for seed in (1, 2, 3)]
    if not verdict.is_rounding(ranks, reference, moved):
        return found
    return dataclasses.replace(found, kind="equal", detail=f"rounding: {found.detail}")
