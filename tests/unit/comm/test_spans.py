"""Spans: nothing where nothing is recorded, threads apart, a bound, exchanges that nobody waits for."""

from __future__ import annotations

import threading

from meshwright.comm import spans
from meshwright.comm.clocks import clock_name
from meshwright.comm.ledger import Ledger
from meshwright.comm.spans import SpanRecorder


def ticking():
    now = [0]

    def clock() -> int:
        now[0] += 10
        return now[0]

    return clock


def test_without_a_recorder_a_span_is_one_and_the_same_context() -> None:
    ledger = Ledger()
    assert ledger.span("wait", "a") is ledger.span("step", "b")
    with ledger.span("wait", "a"):
        pass


def test_spans_nest_and_end_with_an_error() -> None:
    ledger = Ledger(recorder=SpanRecorder(ticking()))
    try:
        with ledger.span("step", "outer", {"step": 1}), ledger.span("wait", "inner"):
            raise ValueError
    except ValueError:
        pass
    assert ledger.recorder is not None
    thread = threading.get_ident()
    assert ledger.recorder.spans == [
        ("wait", "inner", 20, 30, thread, None),
        ("step", "outer", 10, 40, thread, {"step": 1}),
    ]


def test_threads_have_names() -> None:
    recorder = SpanRecorder()
    worker = threading.Thread(target=lambda: recorder.add("wait", "a", recorder.now()), name="own")
    worker.start()
    worker.join()
    assert [recorder.threads[one[4]] for one in recorder.spans] == ["own"]


def test_what_there_is_no_room_for_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(spans, "MOST_SPANS", 2)
    recorder = SpanRecorder()
    for _ in range(5):
        recorder.add("wait", "a", recorder.now())
        recorder.begin_flight("b", {})
    assert (len(recorder.spans), len(recorder.flights), recorder.num_left_out) == (2, 2, 6)


def test_an_exchange_ends_when_that_is_first_known() -> None:
    recorder = SpanRecorder(ticking())
    flight = recorder.begin_flight("all_reduce", {})
    assert flight is not None
    assert flight.end is None
    flight.is_over()
    flight.is_over()
    assert (flight.begin, flight.end) == (10, 20)


def test_processes_of_one_boot_share_a_clock() -> None:
    assert clock_name() == clock_name()
