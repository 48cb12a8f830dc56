"""Report of a failed run: the guilty rank, its traceback, and one line for machines."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import (
    ApplyError,
    CheckpointError,
    ConfigError,
    LostPeerError,
    MeshwrightError,
    MissingDependencyError,
    NonFiniteError,
    PlanError,
    RankNote,
    StorageError,
    UserCodeError,
    exit_code_of,
    rank_of,
)
from meshwright.texts import clean
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []

_FRAME = '  File "'


def guilty_rank(error: BaseException) -> int | None:
    """Return the rank that a failure came from: of a lost peer the peer, and not who waited for it; None where it is not known.

    >>> guilty_rank(LostPeerError("rank 0 has waited 30 s for rank 1", rank=0, peer=1))
    1
    >>> guilty_rank(LostPeerError("connection closed", rank=0)) is None
    True
    """
    return error.peer if isinstance(error, LostPeerError) else rank_of(error)


def report_failure(
    config: TrainConfig, error: BaseException, failures: Mapping[int, dict[str, Any]], last_step: int = 0
) -> int:
    """Write a failure to the standard error: the guilty rank's traceback, the message, and one last line for machines.

    Its step is the one under way, counted from 1 as in the lines of progress; between steps, the one that was done last.
    Of the ranks of a job, which write each for itself, those whose peer has told of the failure leave that line to it.

    Args:
        config: The run's configuration.
        error: What the run ended with.
        failures: What ranks have told of their failures: rank -> the event.
        last_step: Steps that were done [count].

    Returns:
        The exit code.
    """
    rank = guilty_rank(error)
    teller = rank_of(error) if rank is None else rank
    told = failures.get(teller, {}) if teller is not None else {}
    is_ours = isinstance(error, MeshwrightError)
    trace = told.get("traceback") or getattr(error, "traceback_text", "")
    # Nobody who pressed Ctrl-C twice wants to know where.
    if not trace and not is_ours and not isinstance(error, KeyboardInterrupt):
        trace = "".join(traceback.format_exception(error))
    if is_ours:
        trace = _without_message(trace, error)
    step, phase = told.get("step"), told.get("phase")
    if is_ours and not told:
        step, phase = error.step, error.phase
    step, phase = last_step if step is None else step, phase or "run"
    lines = [trace.rstrip(), clean(error) if is_ours else ""]
    name = re.sub(r"\s", "_", config.run_name)
    if not (isinstance(error, LostPeerError) and error.is_told):
        shown = "unknown" if rank is None else rank
        lines.append(f"FATAL run={name} rank={shown} step={step} phase={phase} cause={one_line(error)}")
    sys.stderr.write(clean("\n".join(line for line in lines if line)) + "\n")
    sys.stderr.flush()
    return exit_code_of(error)


def _without_message(trace: str, error: BaseException) -> str:
    """Return the traceback of an error of ours without its text, which is shown below it; "" where users' code has no part.

    What was asked for and cannot be done is an answer: where in this library it is found concerns nobody.
    """
    is_answer = isinstance(error, (ConfigError, CheckpointError, MissingDependencyError, NonFiniteError))
    # Of these a fix says that it was foreseen.
    is_answer |= isinstance(error, (ApplyError, PlanError, StorageError)) and error.fix is not None
    if is_answer and all(map(_is_ours_or_pythons, (line for line in trace.splitlines() if line.startswith(_FRAME)))):
        return ""
    at = trace.rfind(f"\n{type(error).__module__}.{type(error).__qualname__}: ")
    return trace if at < 0 else trace[:at]


def _is_ours_or_pythons(frame: str) -> bool:
    """Tell whether a line of a traceback names a file of this package, or of Python's own library (context managers)."""
    ours, pythons = (f"{_FRAME}{path}{os.sep}" for path in (Path(__file__).parents[1], Path(os.__file__).parent))
    return frame.startswith(ours) or (frame.startswith(pythons) and "-packages" not in frame)


def one_line(error: BaseException) -> str:
    """Return an exception's type, the first line of its text and what is noted about it, without control characters."""
    if isinstance(error, UserCodeError) and error.raised:
        return clean(error.raised).strip().partition("\n")[0][:300]
    notes = [str(note) for note in getattr(error, "__notes__", ()) if not isinstance(note, RankNote)]
    parts = [clean(part).strip().partition("\n")[0][:300] for part in (error, *notes)]
    text = "; ".join(part for part in parts if part)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
