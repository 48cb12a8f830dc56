"""Times of a traced step: each rank's own time by kind, its waits, and the idle share."""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from meshwright.report.trace_read import ReadTrace, TraceSpan
from meshwright.spec.timeline import KINDS

__all__: list[str] = []

BUSY_KINDS: Final = tuple(kind for kind in KINDS if kind not in ("wait", "exchange"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A rank's share of one step.

    Args:
        rank: The rank.
        begin: Its begin: of the step, or of the batch that it waited for [s].
        end: Its end [s].
        spans: What its threads did in it.
        flights: Exchanges beside computation.
        own_s: Kind -> time of the computing thread in it, without what is nested inside [s].
    """

    rank: int
    begin: float
    end: float
    spans: tuple[TraceSpan, ...]
    flights: tuple[TraceSpan, ...]
    own_s: dict[str, float]

    @property
    def busy_s(self) -> float:
        """Its own step without its waits [s]."""
        return self.end - self.begin - self.own_s.get("wait", 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step on all ranks.

    Args:
        number: The step.
        ranks: Each rank's share.
    """

    number: int
    ranks: tuple[RankStep, ...]

    @property
    def begin(self) -> float:
        """When the first rank began [s]."""
        return min(one.begin for one in self.ranks)

    @property
    def seconds(self) -> float:
        """From the first begin to the last end [s]."""
        return max(one.end for one in self.ranks) - self.begin

    @property
    def idle_fraction(self) -> float:
        """Idle time over step time, over all ranks; 0 to 1."""
        whole = len(self.ranks) * self.seconds
        return 1.0 - sum(one.busy_s for one in self.ranks) / whole if whole > 0 else 0.0


def steps_of(trace: ReadTrace) -> list[TracedStep]:
    """Return the steps of a trace, in order; those that some rank did not end are left out."""
    by_rank: defaultdict[int, list[TraceSpan]] = defaultdict(list)
    for span in trace.spans:
        by_rank[span.rank].append(span)
    flights: defaultdict[int, list[TraceSpan]] = defaultdict(list)
    for flight in sorted(trace.flights, key=lambda one: one.begin):
        flights[flight.rank].append(flight)
    found: defaultdict[int, list[RankStep]] = defaultdict(list)
    for rank in sorted(by_rank):
        for number, one in _steps_of_rank(rank, by_rank[rank], flights[rank]).items():
            found[number].append(one)
    return [
        TracedStep(number=number, ranks=tuple(ranks))
        for number, ranks in sorted(found.items())
        if len(ranks) == len(by_rank)
    ]


def middle_step(steps: Sequence[TracedStep]) -> TracedStep:
    """Return the step of median length, the shorter of the middle two."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]


def _steps_of_rank(rank: int, spans: list[TraceSpan], flights: list[TraceSpan]) -> dict[int, RankStep]:
    begins = [span.begin for span in spans]
    flight_begins = [flight.begin for flight in flights]
    found: dict[int, RankStep] = {}
    before = 0.0
    load: TraceSpan | None = None
    for span in spans:
        if span.track:
            continue
        if span.kind == "load":
            load = span
        if span.kind != "step":
            continue
        number = span.details.get("step")
        begin = load.begin if load is not None and before <= load.begin and load.end <= span.begin else span.begin
        before = span.end
        if not isinstance(number, int) or number in found:
            continue
        inside = spans[bisect.bisect_left(begins, begin) : bisect.bisect_right(begins, span.end)]
        beside = flights[bisect.bisect_left(flight_begins, begin) : bisect.bisect_right(flight_begins, span.end)]
        own = own_times([one for one in inside if one.track == 0 and one.end <= span.end])
        between = span.end - begin - sum(own.values())  # the loop's own work, from the batch to the step
        own["step"] += max(0.0, between)
        found[number] = RankStep(
            rank=rank, begin=begin, end=span.end, spans=tuple(inside), flights=tuple(beside), own_s=own
        )
    return found


def own_times(spans: Sequence[TraceSpan]) -> dict[str, float]:
    """Return kind -> time of one thread's spans without what is nested inside them [s].

    Args:
        spans: In the order of their begins, longer ones first.
    """
    own: defaultdict[str, float] = defaultdict(float)
    open_spans: list[TraceSpan] = []
    for span in spans:
        while open_spans and open_spans[-1].end <= span.begin:
            open_spans.pop()
        own[span.kind] += span.seconds
        if open_spans:  # what sticks out of its parent counts inside of it alone
            own[open_spans[-1].kind] -= min(span.end, open_spans[-1].end) - span.begin
        open_spans.append(span)
    return dict(own)


def action_times(step: TracedStep) -> dict[tuple[int, str], list[float]]:
    """Return (stage, kind) -> the time of each of its actions without waits [s]."""
    found: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for one in step.ranks:
        waits = [span for span in one.spans if span.kind == "wait" and span.track == 0]
        begins = [wait.begin for wait in waits]
        for span in one.spans:
            stage = span.details.get("stage")
            if isinstance(stage, int) and span.kind in BUSY_KINDS:
                inside = waits[bisect.bisect_left(begins, span.begin) : bisect.bisect_right(begins, span.end)]
                found[stage, span.kind].append(max(0.0, span.seconds - sum(wait.seconds for wait in inside)))
    return dict(found)
