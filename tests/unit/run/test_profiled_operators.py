"""Operators of the profiler: brought to the rank's clock by marks, nested, cut off where there are too many."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from tests import trace_format

from meshwright.errors import ApplyError
from meshwright.run import profiled_operators
from meshwright.run.profiled_operators import OperatorRecorder
from meshwright.spec.timeline import RankOperators, RankSpans, chrome_trace

CPU = torch.device("cpu")


def test_operators_come_to_the_ranks_clock_and_are_cut_off(capfd) -> None:
    def clock():  # a clock of which torch knows nothing
        return 5 * time.monotonic_ns() + 10**15

    recorder = OperatorRecorder(clock, CPU, 4)
    recorder.start()
    begin = clock()
    x = torch.ones(3, 3) @ torch.ones(3, 3)
    end = clock()
    x + 1
    found = recorder.stop()
    assert capfd.readouterr() == ("", "")
    (name,) = found.tracks
    assert name == "operators of computing"
    assert len(found.tracks[name]) == 4
    assert found.num_left_out > 0
    one = RankSpans(rank=0, threads={1: "x"}, spans=[], flights=[], clock=[(0, 0, 0)], operators=found)
    trace = chrome_trace([RankSpans.from_json(one.to_json())], {"id": "a"})
    assert trace_format.faults_of(trace) == []
    assert trace["otherData"]["num_operators"] == 4
    assert trace["otherData"]["num_operators_left_out"] == found.num_left_out
    first, last = found.clock
    for _, at, until in found.tracks[name]:
        offset = first[1] + (last[1] - first[1]) * (at - first[0]) / (last[0] - first[0])
        error = max(first[2], last[2]) + 1
        assert begin - error <= at + offset <= until + offset <= end + error


def test_what_sticks_out_is_cut_where_its_parent_ends() -> None:
    spans = [("a", 0, 100), ("b", 10, 120), ("c", 20, 30), ("d", 100, 110)]
    assert profiled_operators._nested(spans) == [("a", 0, 100), ("b", 10, 100), ("c", 20, 30), ("d", 100, 110)]


def test_lost_marks_are_an_error() -> None:
    with pytest.raises(ApplyError, match="lost the marks"):
        profiled_operators._compare([1.0], [(0, 1), (2, 3)])


def test_clocks_are_chained() -> None:
    found = RankOperators(
        tracks={"operators of computing": [("mm", 1_000, 3_000)]}, clock=[(0, 500, 7), (4_000, 500, 2)]
    )
    one = RankSpans(
        rank=2, threads={1: "x"}, spans=[("step", "step 1", 0, 9_000, 1, {"step": 1})], flights=[],
        clock=[(0, 100, 0)], operators=found,
    )  # fmt: skip
    trace = chrome_trace([one], {})
    event = next(one for one in trace["traceEvents"] if one.get("cat") == "operator")
    assert (event["ts"], event["dur"], event["pid"], event["tid"]) == (1.5, 2.0, 2, 2)
    assert trace["otherData"]["clocks"]["2"]["operators_error_s"] == 7e-9


def test_kernels_have_a_track_for_each_stream_and_annotations_of_the_gpu_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(profiled_operators, "_NUM_MARKS", 1)

    def event(name, start, end, kind="CPU", **changes):
        about = {
            "device_index": 1,
            "device_resource_id": 7,
            "thread": 3,
            "is_async": False,
            "is_user_annotation": False,
        }
        times = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=times, device_type=SimpleNamespace(name=kind), **(about | changes))

    recorder = OperatorRecorder(time.monotonic_ns, CPU, 100)
    recorder._marks = [(2_000, 2_010), (9_000, 9_010)]
    found = recorder._read(
        [
            event("meshwright.clock", 1.0, 1.001, is_user_annotation=True),
            event("meshwright.clock", 8.0, 8.001, is_user_annotation=True),
            event("meshwright.clock", 1.0, 1.001, "CUDA", is_user_annotation=True),
            event("gemm", 3.0, 4.0, "CUDA"),
            event("copy", 3.5, 5.0, "CUDA", device_resource_id=9),
            event("of the script", 2.0, 6.0, "CUDA", is_user_annotation=True),
            event("gloo:all_reduce", 2.0, 6.0, is_async=True),
            event("aten::mm", 2.0, 2.5),
        ]
    )
    assert found.clock == [(1_000, 1_005, 5), (8_000, 1_005, 5)]
    assert found.tracks == {
        "operators of thread 3": [("aten::mm", 2_000, 2_500)],
        "kernels of GPU 1, stream 7": [("gemm", 3_000, 4_000)],
        "kernels of GPU 1, stream 9": [("copy", 3_500, 5_000)],
    }
