"""Spans: what a rank does from when to when, recorded in the steps that are traced (ADR 0026).

A span costs two reads of the clock and one append; its text is made after the traced steps. Without a
recorder the ledger's `recorder` is None, and nothing is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, Self

__all__: list[str] = []

MOST_SPANS: Final = 200_000
"""Spans that one rank keeps; further ones are counted [count]."""

WAIT: Final = "wait"

Details = dict[str, Any] | tuple[Any, ...] | None
"""What a span tells: plain data; or an exchange's, of which `plain_details` makes that after the traced steps."""


def plain_details(details: Details) -> dict[str, Any] | None:
    """Return plain data. An exchange's are its group, bytes, whether it is a check, its peer's rank in the group, and words."""
    if not isinstance(details, tuple):
        return details
    group, tensor_bytes, is_check, peer, *words = details
    found: dict[str, Any] = {"bytes": tensor_bytes, "axis": group.axis, "ranks": group.ranks, "check": is_check}
    if peer is not None:
        found["peer"] = group.ranks[peer]
    return found | dict.fromkeys(words, True)


class SpanRecorder:
    """Records one rank's spans.

    Args:
        clock: The rank's clock, which only moves forward [ns].
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = clock
        self.spans: list[tuple[str, object, int, int, int, Details]] = []
        """Kind, what has the name as its text, begin and end [ns], thread, details; in the order of their ends."""
        self.flights: list[Flight] = []
        """Exchanges beside computation, in the order of their starts."""
        self.threads: dict[int, str] = {}
        """Thread -> its name."""
        self.num_left_out = 0
        """Spans that there was no room for [count]."""

    def add(self, kind: str, name: object, begin: int, details: Details = None) -> None:
        """Record a span of the calling thread that ends now.

        Args:
            kind: "forward", "wait" and so on; see `spec/timeline.py`.
            name: What stands in its box, or what has that as its text, which is asked for after the traced steps.
            begin: When it began, by `now` [ns].
            details: What it tells.
        """
        end = self.now()
        thread = get_ident()
        if thread not in self.threads:
            self.note_thread()
        if len(self.spans) >= MOST_SPANS:
            self.num_left_out += 1
            return
        self.spans.append((kind, name, begin, end, thread, details))

    def begin_flight(self, name: str, details: tuple[Any, ...]) -> Flight | None:
        """Record the start of an exchange beside computation; None where there is no room."""
        if len(self.flights) >= MOST_SPANS:
            self.num_left_out += 1
            return None
        flight = Flight(self, name, details, self.note_thread())
        self.flights.append(flight)
        return flight

    def note_thread(self) -> int:
        """Return the calling thread, whose name is noted."""
        thread = get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        return thread


class Flight:
    """An exchange that goes on beside computation."""

    __slots__ = ("begin", "details", "end", "name", "recorder", "thread")

    def __init__(self, recorder: SpanRecorder, name: str, details: tuple[Any, ...], thread: int) -> None:
        self.recorder = recorder
        self.name = name
        self.details = details
        self.thread = thread
        self.begin = recorder.now()
        self.end: int | None = None
        """When it was first known to be over; None while it is not [ns]."""

    def is_over(self) -> None:
        """Note that the exchange is known to be over, which it may have been for a while."""
        if self.end is None:
            self.end = self.recorder.now()


class Spanning:
    """Context that records a span of the calling thread."""

    __slots__ = ("_begin", "_details", "_kind", "_name", "_recorder")

    def __init__(self, recorder: SpanRecorder, kind: str, name: object, details: Details) -> None:
        self._recorder = recorder
        self._kind = kind
        self._name = name
        self._details = details

    def __enter__(self) -> Self:
        self._begin = self._recorder.now()
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.add(self._kind, self._name, self._begin, self._details)
