"""Traces of steps on ranks: every exchange of the ledger is there, numbers stay, clocks are aligned, idle is what was waited."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from tests import trace_format
from tests.parity.jobs import trace_jobs

import meshwright as mw
from meshwright import testing
from meshwright.report.step_picture import draw_step
from meshwright.report.step_times import middle_step, steps_of
from meshwright.report.trace_read import read_trace
from meshwright.spec.plan import Plan

PLANS = (
    "dp=2",
    "dp=2,zero=3,whole_below=0B",
    "tp=2",
    "pp=2,micro_batches=3,schedule=zbv,recompute=full",
    "dp=2,pp=2,zero=1,micro_batches=2",
)


@pytest.mark.parametrize("plan", PLANS)
def test_a_trace_has_every_exchange_and_changes_no_number(plan: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = testing.run_ranks(trace_jobs.traced_and_counted, mw.Plan.parse(plan).num_ranks, "gpt", plan, str(path))
    for one in found:
        assert one["losses"][0] == one["losses"][1]
    trace = trace_jobs.read(str(path))
    assert trace_format.faults_of(trace) == []
    assert trace["otherData"]["steps"] == [2, 3]
    kinds = {event.get("cat") for event in trace["traceEvents"]} - {None}
    assert {"step", "forward", "optimizer"} <= kinds
    assert kinds & {"backward", "input_grad"}
    assert ("recompute" in kinds) == ("recompute" in plan)
    assert ("weight_grad" in kinds) == ("zbv" in plan)
    for rank, one in enumerate(found):
        assert one["counted"]
        assert recorded(trace, rank) == one["counted"]


@pytest.mark.parametrize("plan", ["single,micro_batches=2,recompute=full", "data_parallel"])
def test_a_plan_of_one_process_is_traced_without_ranks(plan: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = trace_jobs.traced_and_counted("mlp", str(mw.Plan.parse(plan, num_devices=1 + ("data" in plan))), str(path))
    assert found["losses"][0] == found["losses"][1]
    trace = trace_jobs.read(str(path))
    assert trace_format.faults_of(trace) == []
    forwards = [event for event in trace["traceEvents"] if event.get("cat") == "forward"]
    assert len(forwards) == 4  # two steps of two micro-batches, or of two replicas
    # A thread of the pool that is done with one replica may take the next.
    assert len({event["tid"] for event in forwards}) <= 1 + ("data" in plan)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,micro_batches=2,schedule=zb-h1", "data_parallel"])
def test_operators_of_the_profiler_lie_in_the_spans_of_their_thread(plan: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    if plan == "data_parallel":
        found = [trace_jobs.profiled("mlp", str(mw.Plan.parse(plan, num_devices=2)), str(path))]
    else:
        found = testing.run_ranks(trace_jobs.profiled, mw.Plan.parse(plan).num_ranks, "mlp", plan, str(path))
    for losses, text in found:
        assert losses == found[0][0]
        assert "profiler runs already" in text
    trace = trace_jobs.read(str(path))
    assert trace_format.faults_of(trace) == []
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = {(pid, name): (pid, tid) for (pid, tid), name in names.items()}
    linear = [e for e in events if e.get("cat") == "operator" and e["name"] in ("aten::addmm", "aten::linear")]
    assert len({e["pid"] for e in linear}) == len(found)
    if plan == "data_parallel":  # of all threads, and not of that alone which has started the profiler
        assert all("replica" in names[e["pid"], e["tid"]] for e in linear)
    for one in linear:
        thread = names[one["pid"], one["tid"]].removeprefix("operators of ")
        track = tracks[one["pid"], thread]
        slack_us = 1e6 * trace["otherData"]["clocks"][str(one["pid"])]["operators_error_s"] + 0.1
        assert any(
            span["ts"] - slack_us <= one["ts"] and one["ts"] + one["dur"] <= span["ts"] + span["dur"] + slack_us
            for span in events
            if span.get("cat") == "forward" and (span["pid"], span["tid"]) == track
        )
    read = read_trace(tmp_path, trace["otherData"]["id"])
    assert read.num_damaged == 0
    assert all(span.kind != "operator" for span in read.spans)
    assert "torch.profiler ran" in " ".join(draw_step(read, steps_of(read), None).remarks)


def recorded(trace, rank):
    """Return calls and bytes of a rank's exchanges by "collective axis", messages of a pipeline's notes left out."""
    counts = defaultdict(lambda: [0, 0])
    for event in trace["traceEvents"]:
        details = event.get("args", {})
        is_exchange = event.get("cat") == "exchange" and event["ph"] == "b"
        is_wait = event.get("cat") == "wait" and not details.get("async")
        if event["pid"] == rank and (is_exchange or is_wait) and not details["check"] and not details.get("note"):
            entry = counts[f"{event['name']} {details['axis']}"]
            entry[0] += 1
            entry[1] += details["bytes"]
    return dict(counts)


def test_clocks_of_other_hosts_are_aligned() -> None:
    trace, *_ = testing.run_ranks(trace_jobs.with_other_clocks, 2, "mlp", "dp=2", [0, -7_000_000_000_000], 1e-3)
    assert trace_format.faults_of(trace) == []
    clocks = trace["otherData"]["clocks"]
    assert abs(clocks["1"]["offset_s"] - 7000.0) < 0.1
    error_us = clocks["1"]["error_s"] * 1e6
    assert 0 < error_us < 50_000
    # A barrier ends on both ranks after both have begun it.
    barriers = {
        rank: [
            (e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e["name"] == "barrier" and e["pid"] == rank
        ]
        for rank in (0, 1)
    }
    assert len(barriers[0]) == len(barriers[1]) == 3
    for (begin, end), (other_begin, other_end) in zip(barriers[0], barriers[1], strict=True):
        assert max(begin, other_begin) <= min(end, other_end) + 2 * error_us


def test_an_error_inside_of_a_trace_ends_it(tmp_path: Path) -> None:
    for is_off, text in testing.run_ranks(trace_jobs.raised_inside, 2, "mlp", "dp=2", str(tmp_path / "trace.json")):
        assert is_off
        assert "recorded already" in text


def test_the_drawn_idle_share_of_a_pipeline_is_the_measured_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    measured = testing.run_ranks(trace_jobs.sleep_in_stages, 4, str(path), 0.01, 0.02, 8, 1)
    trace = read_trace(tmp_path, trace_jobs.read(str(path))["otherData"]["id"])
    step = middle_step(steps_of(trace))
    begins, ends, waits = zip(*[rank[0] for rank in measured], strict=True)
    window = max(ends) - min(begins)
    busy = sum(end - begin - wait for begin, end, wait in zip(begins, ends, waits, strict=True))
    assert abs(step.idle_fraction - (1 - busy / (4 * window))) < 0.05  # benchmarks/timeline has it within 0.01, quiet
    picture = draw_step(trace, [step], Plan.parse("pp=4,micro_batches=8"))
    assert abs(drawn_idle(picture.lanes) - step.idle_fraction) < 0.001
    assert picture.simulated_idle_fraction is not None
    assert 3 / 11 - 0.02 < picture.simulated_idle_fraction < step.idle_fraction + 0.02
    assert [len(lane.boxes) for lane in picture.simulated] == [16] * 4


def drawn_idle(lanes):
    """Return the share of the drawing that is idle, from its boxes alone: waits lie over what they interrupt."""
    width = max(box.x + box.width for lane in lanes for box in lane.boxes)
    busy = 0.0
    for lane in lanes:
        step = next(box for box in lane.boxes if box.kind == "step")
        busy += step.width - sum(box.width for box in lane.boxes if box.kind == "wait")
    return 1 - busy / (width * len(lanes))
