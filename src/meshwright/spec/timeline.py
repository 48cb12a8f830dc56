"""Timeline of traced steps as a file: the Chrome trace event format, with what it has no place for in `otherData` (ADR 0026).

Format: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, read 2026-11-25.

A process is a rank; its first thread, tid 1, is the one that computes. Perfetto reads a tid of 0 as "the main thread", whose tid
is the pid: two threads of rank 1 would become one. Ids of exchanges are local to their process, so that it shows them there.
Kinds of spans:

    step         one optimizer step, all of the others inside
    load         waiting for a batch
    forward, backward, input_grad, weight_grad      a micro-batch, on a stage under a pipeline
    recompute    a forward that backward repeats
    optimizer    the update
    wait         the thread stands still for an exchange, or a part of one
    exchange     an exchange beside computation, from its start to when it was known to be over

With torch.profiler added, its events are of the kind "operator", on tracks of their own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__: list[str] = []

TRACE_FILE: Final = "trace.json"
FORMAT: Final = "meshwright timeline 2"
FIRST_TID: Final = 1
"""Thread id of a rank's first track, which computes."""
KINDS: Final = (
    *("step", "load", "forward", "backward", "input_grad", "weight_grad", "recompute", "optimizer", "wait", "exchange"),
)
OPERATOR: Final = "operator"
"""Kind of torch.profiler's events."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankOperators:
    """What torch.profiler has recorded on one rank, on its own clock.

    Args:
        tracks: Track -> name, begin and end [ns], in the order of their begins; what contains others comes first.
        clock: Readings at the begin and at the end: its time, the rank's clock less it, bound of the error [ns].
        num_left_out: Operators that there was no room for [count].
    """

    tracks: Mapping[str, Sequence[tuple[str, int, int]]]
    clock: Sequence[tuple[int, int, int]]
    num_left_out: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """What one rank has recorded, on its own clock.

    Args:
        rank: The rank.
        threads: Thread -> its name; the first computes.
        spans: Kind, name, begin and end [ns], thread, details.
        flights: Name, begin, end or None [ns], thread, details.
        clock: Readings at the begin and at the end: own time, offset to rank 0's, bound of its error [ns].
        num_left_out: Spans that there was no room for [count].
        operators: What torch.profiler has recorded; None where it was not asked.
    """

    rank: int
    threads: Mapping[int, str]
    spans: Sequence[tuple[str, str, int, int, int, Mapping[str, Any] | None]]
    flights: Sequence[tuple[str, int, int | None, int, Mapping[str, Any]]]
    clock: Sequence[tuple[int, int, int]]
    num_left_out: int = 0
    operators: RankOperators | None = None

    def to_json(self) -> str:
        """Return it as JSON, for another rank."""
        # Without the copies of `asdict`: there may be 200,000 spans.
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        if self.operators is not None:
            fields["operators"] = {
                one.name: getattr(self.operators, one.name) for one in dataclasses.fields(self.operators)
            }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankSpans:
        """Read what `to_json` gave."""
        data: dict[str, Any] = json.loads(text)
        data["threads"] = {int(thread): name for thread, name in data["threads"].items()}
        if data["operators"] is not None:
            data["operators"] = RankOperators(**data["operators"])
        return cls(**data)


def common_time(at: int, clock: Sequence[tuple[int, int, int]]) -> int:
    """Return a rank's time on rank 0's clock; between two readings the offset moves evenly [ns].

    >>> common_time(1500, [(1000, 10, 1), (2000, 20, 1)])
    1515
    """
    (begin, first, _), (end, last, _) = clock[0], clock[-1]
    if first == last or end <= begin:
        return at + first
    return at + first + (last - first) * (at - begin) // (end - begin)


def chrome_trace(ranks: Iterable[RankSpans], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spans of all ranks as one Chrome trace.

    Args:
        ranks: What each has recorded.
        about: Further plain data for `otherData`.
    """
    named: list[dict[str, Any]] = []
    timed: list[tuple[int, int, dict[str, Any]]] = []
    clocks: dict[str, dict[str, float]] = {}
    num_left_out = 0
    operators: dict[str, int] = {}
    for one in ranks:
        num_left_out += one.num_left_out
        clocks[str(one.rank)] = {
            "offset_s": one.clock[-1][1] / 1e9,
            "error_s": max(error for _, _, error in one.clock) / 1e9,
        }
        named += _names(one)
        timed += _timed(one)
        if one.operators is not None:
            clocks[str(one.rank)]["operators_error_s"] = max(error for _, _, error in one.operators.clock) / 1e9
            kept = sum(map(len, one.operators.tracks.values()))
            for name, number in (("num_operators", kept), ("num_operators_left_out", one.operators.num_left_out)):
                operators[name] = operators.get(name, 0) + number
            timed += _timed_operators(one, one.operators)
    begin = min((at for at, _, _ in timed), default=0)
    timed.sort(key=lambda entry: entry[:2])  # what contains others stands before them
    for at, _, event in timed:
        event["ts"] = (at - begin) / 1e3
    return {
        "traceEvents": [*named, *(event for _, _, event in timed)],
        "displayTimeUnit": "ms",
        "otherData": {**about, "format": FORMAT, "clocks": clocks, "num_left_out": num_left_out} | operators,
    }


def _names(one: RankSpans) -> list[dict[str, Any]]:
    rank = one.rank
    events = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": FIRST_TID, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": FIRST_TID, "args": {"sort_index": rank}},
    ]
    texts = ["computing", *list(one.threads.values())[1:]]
    texts += one.operators.tracks if one.operators is not None else ()
    for tid, text in enumerate(texts, FIRST_TID):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": text}})
    return events


def _timed(one: RankSpans) -> list[tuple[int, int, dict[str, Any]]]:
    """Return (time on the common clock, order among equals, event)."""
    tids = {thread: tid for tid, thread in enumerate(one.threads, FIRST_TID)}
    found: list[tuple[int, int, dict[str, Any]]] = []
    for kind, name, begin, end, thread, details in one.spans:
        at, until = common_time(begin, one.clock), common_time(end, one.clock)
        event = {
            "ph": "X",
            "cat": kind,
            "name": name,
            "pid": one.rank,
            "tid": tids[thread],
            "dur": (until - at) / 1e3,
        }
        found.append((at, at - until, event if details is None else event | {"args": dict(details)}))
    last = max((end for _, _, _, end, _, _ in one.spans), default=0)
    for number, (name, begin, end, thread, details) in enumerate(one.flights):
        own = {"id2": {"local": str(number)}}
        place = {"cat": "exchange", "name": name, "pid": one.rank, "tid": tids[thread], **own}
        at, until = (common_time(one_end, one.clock) for one_end in (begin, max(last, begin) if end is None else end))
        args = dict(details) if end is not None else {**details, "end": "not seen"}
        found += [(at, 0, {"ph": "b", **place, "args": args}), (until, 0, {"ph": "e", **place})]
    return found


def _timed_operators(one: RankSpans, operators: RankOperators) -> list[tuple[int, int, dict[str, Any]]]:
    """Return what `_timed` does, of torch.profiler's events: their clock, to the rank's, to the common one."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    for tid, spans in enumerate(operators.tracks.values(), FIRST_TID + len(one.threads)):
        for name, begin, end in spans:
            at, until = (common_time(common_time(time, operators.clock), one.clock) for time in (begin, end))
            event = {"ph": "X", "cat": OPERATOR, "name": name, "pid": one.rank, "tid": tid}
            found.append((at, at - until, event | {"dur": (until - at) / 1e3}))
    return found
