"""Checker of Chrome traces, from the documented format and from what Perfetto's importer drops.

Sources, read 2026-11-25: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
phases and their fields, metadata, nesting of duration events within a thread. perfetto.dev/docs/getting-started/other-formats:
slices of one track that overlap without nesting are dropped; legacy asynchronous events pair by category and id.
Perfetto 52 takes the tid 0 of a process for the tid that equals its pid, and shows an `id` outside of any process: seen with
benchmarks/timeline/open_perfetto.mjs.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
PHASES = {"B", "E", "X", "i", "C", "b", "n", "e", "s", "t", "f", "M"}
SLACK_US = 0.002  # timestamps are doubles of microseconds, made of whole nanoseconds


def faults_of(trace: Any) -> list[str]:
    """Return what is wrong with a trace in the object form; [] where nothing is."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no traceEvents"]
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        return ["displayTimeUnit"]
    faults: list[str] = []
    open_slices: defaultdict[tuple[int, int], list[tuple[str, float]]] = defaultdict(list)
    open_async: dict[tuple[object, ...], float] = {}
    last: dict[tuple[int, int], float] = {}
    for number, event in enumerate(trace["traceEvents"]):
        wrong = _fields(event)
        if wrong:
            faults.append(f"event {number}: {wrong}")
            continue
        phase = event["ph"]
        if phase == "M":
            continue
        track, at = (event["pid"], event["tid"]), event["ts"]
        if at < last.get(track, -math.inf):
            faults.append(f"event {number}: ts goes back on track {track}")
        last[track] = at
        if phase in "BEX":
            faults += [f"event {number}: {wrong}" for wrong in _nest(event, open_slices[track])]
        elif phase in "bne":
            faults += [f"event {number}: {wrong}" for wrong in _pair(event, open_async)]
    for track, slices in open_slices.items():
        faults += [f"track {track}: '{name}' does not end" for name, end in slices if math.isinf(end)]
    faults += [f"asynchronous {key} does not end" for key in open_async]
    return faults


def check_file(path: Path) -> list[str]:
    """Return what is wrong with a file."""
    return faults_of(json.loads(path.read_text(encoding="utf-8")))


def _fields(event: Any) -> str:
    if not isinstance(event, dict) or event.get("ph") not in PHASES:
        return "unknown phase"
    if type(event.get("pid")) is not int or type(event.get("tid")) is not int:
        return "pid and tid are integers"
    if event["tid"] < 1:
        return "Perfetto takes a tid of 0 for the tid that equals the pid"
    if not isinstance(event.get("name"), str) and event["ph"] != "E":
        return "no name"
    if not isinstance(event.get("args", {}), dict):
        return "args is not an object"
    if event["ph"] == "M":
        key = METADATA.get(event["name"])
        return "" if key is not None and key in event.get("args", {}) else "unknown metadata"
    for key in ("ts", *(("dur",) if event["ph"] == "X" else ())):
        value = event.get(key)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            return f"{key} is not a time"
    if event["ph"] in "bnesft" and not (_async_id(event) and isinstance(event.get("cat"), str)):
        return "an asynchronous or flow event has a category and an id"
    return ""


def _async_id(event: dict[str, Any]) -> tuple[object, ...]:
    """Return what pairs asynchronous events beside their category; () where there is no id."""
    local = event["id2"].get("local") if isinstance(event.get("id2"), dict) else None
    if isinstance(local, str | int):
        return (event["pid"], local)
    return (event["id"],) if isinstance(event.get("id"), str | int) else ()


def _nest(event: dict[str, Any], slices: list[tuple[str, float]]) -> list[str]:
    at = event["ts"]
    while slices and slices[-1][1] <= at + SLACK_US:
        slices.pop()
    if event["ph"] == "E":
        if not slices or not math.isinf(slices[-1][1]):
            return ["an end without its begin"]
        name, _ = slices.pop()
        return [] if event.get("name", name) == name else [f"ends '{name}'"]
    end = math.inf if event["ph"] == "B" else at + event["dur"]
    wrong = [f"'{event['name']}' overlaps '{slices[-1][0]}'"] if slices and end > slices[-1][1] + SLACK_US else []
    slices.append((event["name"], end))
    return wrong


def _pair(event: dict[str, Any], begun: dict[tuple[object, ...], float]) -> list[str]:
    key = (event["cat"], *_async_id(event))
    if event["ph"] == "b":
        wrong = ["begins twice"] if key in begun else []
        begun[key] = event["ts"]
        return wrong
    if key not in begun:
        return ["has not begun"]
    if event["ts"] < begun[key]:
        return ["ends before it begins"]
    if event["ph"] == "e":
        del begun[key]
    return []
