"""Reading of a run's trace.json with suspicion: what is not a span of ours is counted and left out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

from meshwright.errors import ConfigError
from meshwright.report.run_files import read_json_file
from meshwright.spec.timeline import FIRST_TID, FORMAT, KINDS, OPERATOR, TRACE_FILE

__all__: list[str] = []

MOST_TRACE_BYTES: Final = 128 << 20
"""Largest trace.json that is drawn; Perfetto opens larger ones [bytes]."""
MOST_RANK: Final = 1 << 16
_MOST_TIME_US: Final = 1e15


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span of a rank, in seconds from the trace's begin; its track 0 computes."""

    kind: str
    name: str
    rank: int
    track: int
    begin: float
    end: float
    details: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """How long it lasted [s]."""
        return self.end - self.begin


@dataclasses.dataclass(slots=True)
class ReadTrace:
    """A trace as its file tells of it.

    Args:
        about: The file's `otherData`.
        spans: Complete spans, in the order of their begins.
        flights: Exchanges beside computation.
        threads: (rank, track) -> the thread's name.
        num_damaged: Events that were left out [count].
    """

    about: Mapping[str, Any]
    spans: list[TraceSpan]
    flights: list[TraceSpan]
    threads: dict[tuple[int, int], str]
    num_damaged: int = 0


def read_trace(folder: Path, trace_id: object) -> ReadTrace:
    """Read a run's trace.

    Args:
        folder: The run's folder.
        trace_id: The id that the run's events give it.

    Raises:
        ConfigError: It is not there, is another run's, or cannot be read; the message says which.
        StorageError: The disk fails.
    """
    text = read_json_file(folder / TRACE_FILE, MOST_TRACE_BYTES)
    if text is None:
        raise ConfigError(f"there is no {TRACE_FILE}")
    try:
        data: object = json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):
        raise ConfigError(f"{TRACE_FILE} is damaged") from None
    whole = _mapping(data)
    about, events = _mapping(whole.get("otherData")), whole.get("traceEvents")
    if about.get("format") != FORMAT or not isinstance(events, list):
        raise ConfigError(f"{TRACE_FILE} is not a trace of this program")
    if about.get("id") != trace_id:
        raise ConfigError(f"{TRACE_FILE} is of another run in this folder")
    trace = ReadTrace(about, [], [], {})
    begun: dict[tuple[int, str], TraceSpan] = {}
    for event in cast("list[object]", events):
        if not _take(trace, _mapping(event), begun):
            trace.num_damaged += 1
    trace.num_damaged += len(begun)
    trace.spans.sort(key=lambda span: (span.begin, -span.end))
    return trace


def _take(trace: ReadTrace, event: Mapping[str, Any], begun: dict[tuple[int, str], TraceSpan]) -> bool:
    """Add an event; false where it is not one of ours."""
    rank, tid, phase, name = event.get("pid"), event.get("tid"), event.get("ph"), event.get("name")
    if not (_is_count(rank) and _is_count(tid) and tid >= FIRST_TID and isinstance(name, str)):
        return False
    track = tid - FIRST_TID
    if phase == "M":
        if name == "thread_name":
            trace.threads[rank, track] = str(_mapping(event.get("args")).get("name", ""))
        return True
    kind, begin = event.get("cat"), event.get("ts")
    if kind == OPERATOR:  # torch.profiler's, which the page does not draw
        return True
    if kind not in KINDS or not _is_time(begin):
        return False
    details = _mapping(event.get("args"))
    if phase == "X":
        length = event.get("dur")
        if not _is_time(length):
            return False
        trace.spans.append(TraceSpan(kind, name, rank, track, begin / 1e6, (begin + length) / 1e6, details))
        return True
    local = _mapping(event.get("id2")).get("local")
    if not isinstance(local, str):
        return False
    key = rank, local
    if phase == "b" and key not in begun:
        begun[key] = TraceSpan(kind, name, rank, track, begin / 1e6, begin / 1e6, details)
        return True
    if phase == "e" and key in begun:
        first = begun.pop(key)
        if begin / 1e6 < first.begin:
            return False
        trace.flights.append(dataclasses.replace(first, end=begin / 1e6))
        return True
    return False


def _integer(text: str) -> float:
    """Return a whole number; one that no field can hold becomes infinite, which no field takes."""
    return int(text) if len(text) <= 18 else math.inf


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_RANK


def _is_time(value: object) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(cast("float", value)) and 0 <= cast("float", value) < _MOST_TIME_US
