"""The traced step of a report, computed anew from trace.json alone; for recompute.py."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from shown import UNITS, Check, Page

COLUMNS = (
    ("load",), ("forward",), ("backward", "input_grad", "weight_grad"), ("recompute",), ("optimizer",), ("wait",), ("step",),
)  # fmt: skip


def check_step(check: Check, page: Page, folder: Path, others: dict[str, Any], is_one_process: bool) -> None:
    """Hold the traced step; one process does not see for how long its devices are idle, and shows none."""
    if "traced" not in others:
        return
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    check.same(
        "the trace is this run's",
        others["traced"]["id"],
        json.loads((folder / "trace.json").read_text())["otherData"]["id"],
    )
    ranks = sorted({e["pid"] for e in events})
    numbers = sorted({e["args"]["step"] for e in events if e.get("cat") == "step"})
    shares = {number: step_share(events, ranks, number) for number in numbers}
    rows = page.tables.get("All traced steps", [])[1:]
    if len(numbers) > 1:
        check.same("traced steps", [row[0] for row in rows], [str(n) for n in numbers])
    for row in rows:
        length, idle, _ = shares[int(row[0])]
        check.number(f"length of step {row[0]}", row[1], length)
        check.number(f"idle share of step {row[0]}", row[2], None if is_one_process else idle)
    label = next(name for name in page.tables if name.startswith("Where the time of step"))
    number = int(re.findall(r"\d+", label)[0])
    middle = sorted(shares, key=lambda one: shares[one][0])[(len(shares) - 1) // 2]
    check.same("the step of median length", number, middle)
    length, idle, by_rank = shares[number]
    for row in page.tables[label][1:]:
        own = by_rank[int(row[0].split()[1])]
        kinds = innermost(events, int(row[0].split()[1]), number)
        for text, names in zip(row[1:8], COLUMNS, strict=True):
            check.number(f"{names[0]} of {row[0]}", text, sum(kinds.get(name, 0.0) for name in names) or None)
        check.number(f"idle share of {row[0]}", row[8], None if is_one_process else 1 - own["busy"] / length)
        parts = sum(parse(text) for text in row[1:8])
        check.close(f"parts of {row[0]} make its step", parts, own["span"], 2e-3 * own["span"])
    check_boxes(check, page, length, None if is_one_process else idle)
    label = next(name for name in page.tables if name.startswith("Exchanges of step"))
    check_exchanges(check, page.tables[label][1:], events, ranks, number)


def innermost(events: list[Any], rank: int, number: int) -> dict[str, float]:
    """Return for how long a span of each kind was the innermost one of the computing thread; "step" where none was [s]."""
    begin, end = window_of(events, rank, number)
    mine = [
        (e["ts"], e["ts"] + e["dur"], e["cat"]) for e in events
        if e["pid"] == rank and e["tid"] == 1 and e["ph"] == "X" and begin <= e["ts"] and e["ts"] + e["dur"] <= end + 1e-3
    ]  # fmt: skip
    edges = sorted({edge for first, last, _ in mine for edge in (first, last)})
    found: defaultdict[str, float] = defaultdict(float)
    for left, right in itertools.pairwise(edges):
        over = [one for one in mine if one[0] <= left and right <= one[1]]
        kind = max(over, key=lambda one: (one[0], -one[1]))[2] if over else "step"
        found[kind] += (right - left) / 1e6
    return found


def parse(text: str) -> float:
    if text == "-":
        return 0.0
    number, unit = re.fullmatch(r"([0-9.]+) ?([a-z]+)", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def window_of(events: list[Any], rank: int, number: int) -> tuple[float, float]:
    """Return when a rank began a step, with the reading of its batch, and when it ended it [us]."""
    mine = [e for e in events if e["pid"] == rank and e["tid"] == 1 and e["ph"] == "X"]
    step = next(e for e in mine if e["cat"] == "step" and e["args"]["step"] == number)
    before = max((e["ts"] + e["dur"] for e in mine if e["cat"] == "step" and e["ts"] < step["ts"]), default=-1.0)
    loads = [e["ts"] for e in mine if e["cat"] == "load" and before - 1e-3 <= e["ts"] <= step["ts"]]
    return min([step["ts"], *loads[-1:]]), step["ts"] + step["dur"]


def step_share(events: list[Any], ranks: list[int], number: int) -> tuple[float, float, dict[int, dict[str, float]]]:
    """Return a step's length, its idle share, and each rank's times, with waits as a union of intervals [s]."""
    windows = {rank: window_of(events, rank, number) for rank in ranks}
    length = max(end for _, end in windows.values()) - min(begin for begin, _ in windows.values())
    found: dict[int, dict[str, float]] = {}
    for rank, (begin, end) in windows.items():
        waits = [
            (e["ts"], e["ts"] + e["dur"]) for e in events
            if e["pid"] == rank and e["tid"] == 1 and e.get("cat") == "wait" and begin <= e["ts"] < end
        ]  # fmt: skip
        waited, reached = 0.0, begin
        for first, last in sorted(waits):
            waited += max(0.0, last - max(first, reached))
            reached = max(reached, last)
        found[rank] = {"wait": waited / 1e6, "busy": (end - begin - waited) / 1e6, "span": (end - begin) / 1e6}
    busy = sum(one["busy"] for one in found.values())
    return length / 1e6, 1 - busy / (len(ranks) * length / 1e6), found


def check_boxes(check: Check, page: Page, length: float, idle: float | None) -> None:
    """Hold the idle share of the drawing, from its boxes alone, to that of the trace."""
    if idle is None:
        match = re.search(r"took ([0-9.]+ [a-z]+) in one process", " ".join(page.verdicts))
        check.number("the verdict's time", match[1] if match else None, length)
        return
    boxes = next(found for label, found in page.boxes.items() if "as it ran" in label)
    lanes: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for lane, kind, x, width in boxes:
        if re.fullmatch(r"rank \d+", lane):
            lanes[lane].append((kind, x, width))
    edges = [
        edge
        for found in lanes.values()
        for kind, x, width in found
        if kind in ("k-step", "k-load")
        for edge in (x, x + width)
    ]
    whole = max(edges) - min(edges)
    busy = 0.0
    for found in lanes.values():
        ends = [(x, x + width) for kind, x, width in found if kind in ("k-step", "k-load")]
        busy += max(end for _, end in ends) - min(begin for begin, _ in ends)
        busy -= sum(width for kind, _, width in found if kind == "k-wait")
    check.close("drawn idle share", 1 - busy / (whole * len(lanes)), idle, 2e-3)
    match = re.search(r"took ([0-9.]+ [a-z]+); ranks were idle for ([0-9.]+%)", " ".join(page.verdicts))
    check.number("the verdict's time", match[1] if match else None, length)
    check.number("the verdict's idle share", match[2] if match else None, idle)


def check_exchanges(check: Check, rows: list[list[str]], events: list[Any], ranks: list[int], number: int) -> None:
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for rank in ranks:
        begin, end = window_of(events, rank, number)
        for e in events:
            if (
                e["pid"] != rank
                or not begin <= e.get("ts", -1) <= end
                or e["ph"] == "e"
                or e.get("cat") not in ("wait", "exchange")
            ):
                continue
            about = e.get("args", {})
            purpose = "check" if about.get("check") else "note" if about.get("note") else "step"
            entry = found[e["name"], str(about.get("axis", "")), purpose]
            is_counted = e["ph"] == "b" or not about.get("async")
            entry[0] += is_counted
            entry[1] += about.get("bytes", 0) if is_counted else 0
            entry[2] += e["dur"] / 1e6 if e["ph"] == "X" else 0.0
    check.same("kinds of exchanges", {tuple(row[:3]) for row in rows}, set(found))
    for row in rows:
        calls, size, wait = (value / len(ranks) for value in found[row[0], row[1], row[2]])
        for text, value, what in ((row[3], calls, "calls"), (row[4], size, "bytes"), (row[5], wait, "waiting")):
            check.number(f"{what} of {row[:3]}", text, value)
