"""The traced step of a report: read with suspicion, its times, its lanes; and the checker of traces itself."""

from __future__ import annotations

import json

import pytest
from tests import trace_format
from tests.unit.report.made_runs import HOSTILE, Page, started, step

from meshwright.report import step_picture
from meshwright.report.page import render
from meshwright.report.run_files import read_run
from meshwright.report.step_times import own_times, steps_of
from meshwright.report.trace_read import TraceSpan, read_trace
from meshwright.spec.plan import Plan
from meshwright.spec.timeline import RankSpans, chrome_trace, common_time

MS = 1_000_000


def spans_of(rank, shift_ns=0):
    """Return a step of 10 ms: 1 waiting for data, 4 forward with a wait of 2 inside, 3 backward with 1 repeated, 1 updating."""
    rows = [
        ("wait", "receive", 2, 4, {"bytes": 64, "axis": "pp", "ranks": [0, 1], "peer": 1, "check": False}),
        ("load", "load", 0, 1, None),
        ("forward", "0F0", 1, 5, {"stage": rank, "micro_batch": 0}),
        ("recompute", HOSTILE, 6, 7, None),
        ("backward", "0B0", 5, 8, {"stage": rank, "micro_batch": 0}),
        ("optimizer", "optimizer", 8, 9, None),
        ("step", "step 3", 1, 10, {"step": 3}),
    ]
    return [(kind, name, a * MS + shift_ns, b * MS + shift_ns, 77, details) for kind, name, a, b, details in rows]


def make_trace(**about):
    flights = [("send", 5 * MS, None, 77, {"bytes": 8, "axis": "pp", "ranks": [0, 1], "check": False})]
    ranks = [
        RankSpans(
            rank=rank, threads={77: "x"}, spans=spans_of(rank), flights=flights, clock=[(0, 0, 0), (9 * MS, 0, 0)]
        )
        for rank in (0, 1)
    ]
    return chrome_trace(ranks, {"id": "abc", "plan": "pp=2", "device": "cpu", **about})


def traced_run(make_run, trace, told_id="abc", plan="pp=2,micro_batches=1"):
    from tests.unit.report.made_runs import make_record

    events = [started(plan=plan), step(1), {"event": "traced", "step": 1, "steps": [3], "id": told_id}]
    folder = make_run([*events, {"event": "finished", "step": 1}], make_record(plan=plan))
    (folder / "trace.json").write_text(trace if isinstance(trace, str) else json.dumps(trace))
    return folder


def test_time_between_the_batch_and_the_step_is_counted(tmp_path):
    spans = [
        ("load", "load", 0, MS, 77, None), ("step", "step 1", 3 * MS, 9 * MS, 77, {"step": 1}),
        ("forward", "F0", 4 * MS, 6 * MS, 77, {"stage": 0, "micro_batch": 0}),
    ]  # fmt: skip
    one = RankSpans(rank=0, threads={77: "x"}, spans=spans, flights=[], clock=[(0, 0, 0)])
    (tmp_path / "trace.json").write_text(json.dumps(chrome_trace([one], {"id": "abc"})))
    (found,) = steps_of(read_trace(tmp_path, "abc"))
    times = {kind: round(1000 * seconds, 6) for kind, seconds in found.ranks[0].own_s.items()}
    assert times == {"load": 1, "step": 6, "forward": 2}
    assert sum(times.values()) == 1000 * round(found.seconds, 9)


def test_a_made_trace_is_sound_and_its_times_are_exact(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps(make_trace()))
    assert trace_format.check_file(tmp_path / "trace.json") == []
    trace = read_trace(tmp_path, "abc")
    assert trace.num_damaged == 0
    (found,) = steps_of(trace)
    assert (found.number, round(found.seconds, 9)) == (3, 0.01)
    times = {kind: round(1000 * seconds, 6) for kind, seconds in found.ranks[0].own_s.items()}
    assert times == {"load": 1, "step": 1, "forward": 2, "wait": 2, "backward": 2, "recompute": 1, "optimizer": 1}
    assert found.idle_fraction == pytest.approx(0.2)


def test_times_of_ranks_whose_clocks_drift_meet():
    clock = [(1_000_000, -1_000_000, 5), (2_000_000, -1_000_100, 5)]
    assert [common_time(at, clock) for at in (1_000_000, 1_500_000, 2_000_000)] == [0, 499_950, 999_900]


def test_own_times_count_what_sticks_out_once():
    spans = [TraceSpan("step", "a", 0, 0, 0.0, 4.0, {}), TraceSpan("wait", "b", 0, 0, 3.0, 5.0, {})]
    assert own_times(spans) == {"step": 3.0, "wait": 2.0}


def test_the_page_draws_each_rank_and_shows_names_as_text(make_run):
    folder = traced_run(make_run, make_trace())
    run = read_run(folder)
    page = Page(render([run]))
    assert page.open_tags == []
    assert "Step 3 took 10 ms; ranks were idle for 20.0% of it" in page.text
    assert "The schedule as simulated" in page.text
    kinds = [attributes.get("class") for tag, attributes in page.tags if tag == "rect" and "y" in attributes]
    assert kinds.count("k-forward") == 4  # two as they ran, two as simulated
    assert kinds.count("k-wait") == 2
    assert kinds.count("k-exchange") == 2
    assert not any(tag == "img" for tag, _ in page.tags)
    assert run.problems == []


@pytest.mark.parametrize(
    ("trace", "told_id", "problem"),
    [
        ("{", "abc", "damaged"),
        ("[]", "abc", "not a trace of this program"),
        ("[" * 100_000, "abc", "damaged"),
        (make_trace(), "other", "of another run"),
        (chrome_trace([], {"id": "abc"}), "abc", "holds no step"),
    ],
    ids=["cut", "list", "deep", "stale", "empty"],
)
def test_a_trace_that_cannot_be_drawn_is_told(make_run, trace, told_id, problem):
    run = read_run(traced_run(make_run, trace, told_id))
    assert "One step" not in Page(render([run])).text
    assert any(problem in text for text in run.problems)


def test_events_of_strangers_are_counted_and_left_out(make_run):
    trace = make_trace()
    good = len(trace["traceEvents"])
    trace["traceEvents"] += [
        None, 3, {"ph": "X"}, {"ph": "X", "cat": "wait", "name": "a", "pid": 0, "tid": 1, "ts": "1", "dur": 1},
        {"ph": "X", "cat": "wait", "name": "a", "pid": 0, "tid": 0, "ts": 1, "dur": 1},
        {"ph": "b", "cat": "exchange", "name": "a", "pid": 0, "tid": 1, "ts": 1, "id": "0.0"},
        {"ph": "X", "cat": "wait", "name": "a", "pid": 10**9, "tid": 1, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "own", "name": "a", "pid": 0, "tid": 1, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "wait", "name": "a", "pid": 0, "tid": 1, "ts": 1, "dur": float("inf")},
        {"ph": "e", "cat": "exchange", "name": "a", "pid": 0, "tid": 1, "ts": 1, "id2": {"local": "never"}},
        {"ph": "b", "cat": "exchange", "name": "a", "pid": 0, "tid": 1, "ts": 1, "id2": {"local": "open"}},
    ]  # fmt: skip
    run = read_run(traced_run(make_run, trace))
    assert "ranks were idle for 20.0%" in Page(render([run])).text
    assert run.problems == [f"trace.json: {len(trace['traceEvents']) - good} events were left out (damaged)"]


def test_numbers_that_no_field_holds_are_left_out(make_run):
    trace = make_trace()
    for event in trace["traceEvents"]:
        if "args" in event and "bytes" in event["args"]:
            event["args"] |= {"bytes": 10**400, "micro_batch": 10**400}
    trace["traceEvents"].append(trace["traceEvents"][-1] | {"ts": 10**400})
    trace["otherData"]["clocks"] = {"0": {"error_s": 10**400}, "1": {"error_s": float("nan")}, "2": 3}
    run = read_run(traced_run(make_run, trace))
    assert "ranks were idle for 20.0%" in Page(render([run])).text


def test_one_process_shows_no_idle_share(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps(make_trace()))
    trace = read_trace(tmp_path, "abc")
    picture = step_picture.draw_step(trace, steps_of(trace), Plan.parse("mode=data_parallel,dp=2"))
    assert "in one process, which does not see for how long its devices were idle" in picture.verdict
    assert [row[-1] for row in (*picture.times, *picture.steps)] == ["-"] * (len(picture.times) + len(picture.steps))


def test_a_run_without_a_trace_has_no_such_page(make_run):
    assert "One step" not in Page(render([read_run(make_run())])).text


def test_many_boxes_are_merged_and_keep_the_idle_share(make_run, monkeypatch):
    waits = [("wait", "w", MS + 10 * at, MS + 10 * at + 5, 77, None) for at in range(4000)]
    step_span = ("step", "step 1", 0, 2 * MS, 77, {"step": 1})
    one = RankSpans(rank=0, threads={77: "x"}, spans=[*waits, step_span], flights=[], clock=[(0, 0, 0)])
    folder = traced_run(make_run, chrome_trace([one], {"id": "abc"}))
    monkeypatch.setattr(step_picture, "MOST_BOXES", 100)
    picture = step_picture.picture_step(read_run(folder))
    assert picture is not None
    assert len(picture.lanes[0].boxes) < 200
    assert picture.idle_fraction == pytest.approx(4000 * 5 / (2 * MS))
    assert any("merged" in text for text in picture.remarks)


BASE = {"pid": 0, "tid": 1, "name": "a", "cat": "c"}


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([{**BASE, "ph": "Q", "ts": 1}], "unknown phase"),
        ([{**BASE, "ph": "X", "ts": 1}], "dur"),
        ([{**BASE, "ph": "X", "ts": -1, "dur": 1}], "ts"),
        ([{**BASE, "ph": "X", "ts": 5, "dur": 1}, {**BASE, "ph": "X", "ts": 4, "dur": 1}], "goes back"),
        ([{**BASE, "ph": "X", "ts": 1, "dur": 5}, {**BASE, "ph": "X", "ts": 4, "dur": 5}], "overlaps"),
        ([{**BASE, "ph": "B", "ts": 1}], "does not end"),
        ([{**BASE, "ph": "E", "ts": 1}], "without its begin"),
        ([{**BASE, "ph": "B", "ts": 1}, {**BASE, "ph": "E", "ts": 2, "name": "b"}], "ends 'a'"),
        ([{**BASE, "ph": "e", "ts": 1, "id": "1"}], "has not begun"),
        ([{**BASE, "ph": "b", "ts": 1, "id": "1"}], "does not end"),
        ([{**BASE, "ph": "b", "ts": 1}], "an id"),
        ([{**BASE, "ph": "X", "ts": 1, "dur": 1, "tid": "main"}], "integers"),
        ([{**BASE, "ph": "X", "ts": 1, "dur": 1, "tid": 0}], "tid of 0"),
        (
            [
                {**BASE, "ph": "b", "ts": 1, "id2": {"local": "1"}},
                {**BASE, "pid": 1, "ph": "e", "ts": 2, "id2": {"local": "1"}},
            ],
            "has not begun",
        ),
        ([{"ph": "M", "pid": 0, "tid": 1, "name": "favourite_colour", "args": {}}], "metadata"),
    ],
)
def test_the_checker_finds_what_is_wrong(events, fault):
    assert fault in " ".join(trace_format.faults_of({"traceEvents": events}))


def test_the_checker_takes_what_is_right():
    events = [
        {**BASE, "ph": "B", "ts": 1}, {**BASE, "ph": "X", "ts": 2, "dur": 3}, {**BASE, "ph": "b", "ts": 2, "id": 1},
        {**BASE, "ph": "E", "ts": 5}, {**BASE, "ph": "X", "ts": 5, "dur": 1}, {**BASE, "ph": "e", "ts": 9, "id": 1},
    ]  # fmt: skip
    assert trace_format.faults_of({"traceEvents": events}) == []
