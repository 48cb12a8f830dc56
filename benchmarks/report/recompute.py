"""Computes every number of reports anew, from a run's files alone: `recompute.py RUN_DIR...`

It shares no code with the report: files are read as plain JSON, the page as plain HTML, statistics come from Python's own module.
A text such as "84.8 ms" is held to the digits that it shows.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

UNITS = {
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "%": 0.01, "": 1.0,
}  # fmt: skip
COLUMNS = (
    ("load",), ("forward",), ("backward", "input_grad", "weight_grad"), ("recompute",), ("optimizer",), ("wait",), ("step",),
)  # fmt: skip
WARM_UP = 3
BLOCK = 8
FIGURES = {
    "loss": "loss", "tokens": "tokens_per_s", "samples": "samples_per_s", "norm": "grad_norm", "memory": "peak_memory_bytes",
    "rate": "lr",
}  # fmt: skip


class Page(HTMLParser):
    """Tables by label, facts, verdicts, drawn boxes and data of a report of one run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.facts: dict[str, str] = {}
        self.verdicts: list[str] = []
        self.boxes: dict[str, list[tuple[str, str, float, float]]] = defaultdict(list)
        self.data: Any = None
        self._label = self._lane = self._picture = self._name = ""
        self._cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "div" and given.get("role") == "region":
            self._label = given["aria-label"] or ""
        elif tag == "tr":
            self.tables.setdefault(self._label, []).append([])
        elif tag in ("th", "td", "dt", "dd") or (tag == "p" and given.get("class") == "verdict"):
            self._cell = []
        elif tag == "br" and self._cell is not None:
            self._cell.append("\n")
        elif tag == "svg":
            self._picture = given.get("class") or ""
        elif tag == "g":
            self._lane = given.get("data-lane") or ""
        elif tag == "rect" and self._picture == "lanes":
            place = self.boxes[self._label]
            place.append((self._lane, given["class"] or "", float(given["x"] or 0), float(given["width"] or 0)))
        elif tag == "script" and given.get("id") == "data":
            self._cell = []

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if self._cell is None or tag not in ("th", "td", "dt", "dd", "p", "script"):
            return
        text, self._cell = "".join(self._cell), None
        if tag in ("th", "td"):
            self.tables[self._label][-1].append(text)
        elif tag == "dt":
            self._name = text
        elif tag == "dd":
            self.facts[self._name] = text
        elif tag == "p":
            self.verdicts.append(text)
        else:
            self.data = json.loads(text)


class Check:
    """Counts comparisons, and keeps those that failed."""

    def __init__(self) -> None:
        self.count = 0
        self.wrong: list[str] = []

    def number(self, what: str, shown: str | None, value: float | None) -> None:
        """Hold a shown number to the digits that it shows; "-" stands for none."""
        self.count += 1
        if value is None or shown in (None, "-"):
            if not ((value is None or value == 0) and shown in (None, "-")):
                self.wrong.append(f"{what}: {shown!r} for {value!r}")
            return
        match = re.fullmatch(r"(-?[0-9.,]+(?:e[-+]?\d+)?) ?([A-Za-z%]*)", shown or "")
        if match is None or match[2] not in UNITS:
            self.wrong.append(f"{what}: {shown!r} is not a number")
            return
        digits = match[1].replace(",", "")
        mantissa, _, exponent = digits.partition("e")
        places = len(mantissa.partition(".")[2]) - int(exponent or 0)
        slack = 0.501 * 10**-places * UNITS[match[2]]
        read = float(digits) * UNITS[match[2]]
        # Trailing zeros are not shown, so four digits are the most that a text promises.
        if abs(read - value) > max(
            slack if "." in mantissa or value == 0 else 0.0, 6e-4 * abs(value) if not match[2] else slack
        ):
            self.wrong.append(f"{what}: {shown!r} for {value!r}")

    def same(self, what: str, shown: object, value: object) -> None:
        """Hold equal things equal."""
        self.count += 1
        if shown != value:
            self.wrong.append(f"{what}: {shown!r} for {value!r}")

    def close(self, what: str, shown: float, value: float, slack: float) -> None:
        """Hold two numbers close."""
        self.count += 1
        if not abs(shown - value) <= slack:
            self.wrong.append(f"{what}: {shown!r} for {value!r}")


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of linear interpolation."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def statistics_of(events: list[dict[str, Any]], name: str) -> list[float | None]:
    values = finite(events, name)
    if not values:
        return [None] * 7
    low, median, high = quartiles(values)
    ends = [one[name] if finite_one(one.get(name)) else None for one in (events[0], events[-1])]
    return [ends[0], min(values), low, median, high, max(values), ends[1]]


def read_events(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return steps, evaluations, and other events by kind (the last of each), with what a resumption undid left out."""
    steps: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    others: dict[str, Any] = {}
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "run_started":
            steps, evaluations, others = [], [], {}
        if event["event"] == "resumed":
            steps = [one for one in steps if one["step"] <= event["step"]]
            evaluations = [one for one in evaluations if one["step"] <= event["step"]]
            others.pop("run_started", None)
            others["run_started"] = event
        if event["event"] == "step":
            steps.append(event)
        elif event["event"] == "evaluated":
            evaluations.append(event)
        else:
            others[event["event"]] = event
    return steps, evaluations, others


def finite(events: list[dict[str, Any]], name: str) -> list[float]:
    return [e[name] for e in events if isinstance(e.get(name), int | float) and math.isfinite(e[name])]


def check_facts(
    check: Check, page: Page, steps: list[Any], evaluations: list[Any], start: dict[str, Any], record: Any
) -> None:
    facts = dict(page.facts)
    check.same("steps done", facts.pop("steps done"), str(steps[-1]["step"]))
    for key, label in (("num_parameters", "parameters"), ("global_batch_size", "samples in a step")):
        check.same(label, facts.pop(label), f"{start[key]:,}")
    measured = record["measurement"] or {}
    seconds = measured.get("step_seconds") or []
    expected: dict[str, float | None] = {}
    if seconds:
        expected = {
            "median step": statistics.median(seconds),
            "samples/s": measured["num_samples"] / sum(seconds),
            "peak memory, fullest rank": measured["peak_memory_bytes"],
            "last loss": steps[-1]["loss"],
        }
        if "tokens/s" in facts:
            expected["tokens/s"] = measured["num_tokens"] / sum(seconds)
        # The record itself against the events.
        last = finite(steps, "seconds")[-len(seconds) :]
        check.same("the record's steps are the events'", seconds, last)
        check.same(
            "the record's samples", measured["num_samples"], sum(e["num_samples"] for e in steps[-len(seconds) :])
        )
        check.same("the record's tokens", measured["num_tokens"], sum(e["num_tokens"] for e in steps[-len(seconds) :]))
        check.same("the fullest rank", measured["peak_memory_bytes"], max(measured["rank_peak_memory_bytes"]))
    if evaluations:
        expected["last held-out loss"] = evaluations[-1]["loss"]
    if record["prediction"] and seconds:
        expected["step time, measured over predicted"] = statistics.median(seconds) / predicted_step(record)
    for name, value in expected.items():
        check.number(name, facts.pop(name, None), value)
    facts.pop("plan"), facts.pop("device", None)
    check.same("facts that were not checked", facts, {})


def predicted_step(record: Any) -> float:
    return sum(record["prediction"]["time"].values())


def check_figures(check: Check, page: Page, steps: list[Any], evaluations: list[Any]) -> None:
    for figure in page.data["figures"]:
        name = figure["key"].partition("-")[2]
        table = page.tables[f"{figure['title']}: numbers"]
        x = figure["x"]
        if name == "time":
            check_times(check, figure, table, steps)
            continue
        values = {e["step"]: e[FIGURES[name]] for e in steps}
        check_line(check, figure["title"], x, figure["lines"][0]["y"], values)
        shown = [("", table[1][1:], steps, FIGURES[name])]
        if name == "loss" and evaluations:
            held = {e["step"]: e["loss"] for e in evaluations}
            check_line(check, "held-out loss", x, figure["lines"][1]["y"], held)
            shown.append(("held-out ", table[2][1:], evaluations, "loss"))
        for label, row, events, column in shown:
            for text, value in zip(row, statistics_of(events, column), strict=True):
                check.number(f"{label}{figure['title']}, statistics", text, value)


def check_line(check: Check, what: str, x: list[int], y: list[float | None], values: dict[int, float]) -> None:
    """Hold drawn points against the events; where a curve is thinned, its lowest and highest of each stretch."""
    drawn = [(at, value) for at, value in zip(x, y, strict=True) if value is not None]
    if len(values) <= len(drawn) or len(values) < 1000:
        check.same(
            f"{what}: steps", [at for at, _ in drawn], [at for at, one in sorted(values.items()) if finite_one(one)]
        )
        for at, value in drawn:
            check.close(f"{what}, step {at}", value, values[at], 1e-6 * abs(values[at]))
    else:
        known = sorted(values.values())
        check.close(f"{what}, lowest", min(value for _, value in drawn), known[0], 1e-6 * abs(known[0]))
        check.close(f"{what}, highest", max(value for _, value in drawn), known[-1], 1e-6 * abs(known[-1]))


def finite_one(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def check_times(check: Check, figure: Any, table: list[list[str]], steps: list[Any]) -> None:
    values = {e["step"]: e["seconds"] for e in steps}
    lines = {line["label"]: line["y"] for line in figure["lines"]}
    check_line(check, "step time", figure["x"], lines["step time"], values)
    series = finite(steps, "seconds")
    rows = {row[0]: row[1:] for row in table[1:]}
    late = rows.get(f"without the first {WARM_UP}")
    for row, kept in ((rows["all steps"], steps), (late, steps[WARM_UP:])):
        for text, value in zip(row or (), statistics_of(kept, "seconds"), strict=False):
            check.number("step time, statistics", text, value)
    if len(steps) < 1000:
        for place in range(len(steps)):
            low, _, high = quartiles(series[place // BLOCK * BLOCK : place // BLOCK * BLOCK + BLOCK])
            for label, value in (("lower quartile", low), ("upper quartile", high)):
                check.close(f"{label} at {place}", lines[label][place], value, 1e-6 * value)


def check_plan(check: Check, page: Page, record: Any) -> None:
    peaks = (record["measurement"] or {}).get("rank_peak_memory_bytes") or []
    for rank, row in enumerate(page.tables.get("Peak memory by rank", [])[1:]):
        check.same(f"peak memory of rank {rank}", row, [str(rank), f"{peaks[rank]:,}"])
    for name, shape, _, parts in page.tables.get("Every tensor", [])[1:]:
        tensor = record["tensors"][name]
        check.same(f"shape of {name}", shape, " x ".join(map(str, tensor["shape"])))
        told = re.findall(r"rank ([0-9,-]+): (.*)", parts)
        check.same(f"parts of {name}", told, list(tensor["held"].items()))
    rows = page.tables.get("Layers by ranks", [])
    if not rows:
        return
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in record["tensors"]:
        layers[name.rpartition(".")[0] or name].append(name)
    columns = {place: ranks_of(text) for place, text in enumerate(rows[0]) if re.match(r"ranks? \d", text)}
    for row in rows[1:]:
        sizes = {name: math.prod(record["tensors"][name]["shape"]) for name in layers[row[0]]}
        check.same(f"numbers of {row[0]}", row[1], f"{sum(sizes.values()):,}")
        for place, ranks in columns.items():
            for rank in ranks:
                held = sum(share_of(record["tensors"][name], rank) * size for name, size in sizes.items())
                share = held / sum(sizes.values()) if sum(sizes.values()) else 1.0
                text = row[place]
                value = {"whole": 1.0, "-": 0.0}.get(text)
                if value is None:
                    check.number(f"share of {row[0]} on rank {rank}", text, share)
                else:
                    check.same(f"share of {row[0]} on rank {rank}", value, share)


def ranks_of(text: str) -> list[int]:
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


def share_of(tensor: Any, rank: int) -> float:
    """Return a rank's share of a tensor: the product over its dims, or of the entries of its flat part."""
    for ranks, part in tensor["held"].items():
        if rank in ranks_of(ranks):
            share = 1.0
            for pieces, whole in re.findall(r"(?:dim \d+:|entries) ((?:\d+-\d+(?:, )?)+) of (\d+)", part):
                share *= sum(int(b) - int(a) for a, b in re.findall(r"(\d+)-(\d+)", pieces)) / max(1, int(whole))
            return share
    return 0.0


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
    """Return for how long a span of each kind was the innermost one of the computing thread in a step [s]."""
    begin, end = window_of(events, rank, number)
    mine = [
        (e["ts"], e["ts"] + e["dur"], e["cat"]) for e in events
        if e["pid"] == rank and e["tid"] == 0 and e["ph"] == "X" and begin <= e["ts"] and e["ts"] + e["dur"] <= end + 1e-3
    ]  # fmt: skip
    edges = sorted({edge for first, last, _ in mine for edge in (first, last)})
    found: defaultdict[str, float] = defaultdict(float)
    for left, right in itertools.pairwise(edges):
        over = [one for one in mine if one[0] <= left and right <= one[1]]
        if over:
            found[max(over, key=lambda one: (one[0], -one[1]))[2]] += (right - left) / 1e6
    return found


def parse(text: str) -> float:
    if text == "-":
        return 0.0
    number, unit = re.fullmatch(r"([0-9.]+) ?([a-z]+)", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def window_of(events: list[Any], rank: int, number: int) -> tuple[float, float]:
    """Return when a rank began a step, with the reading of its batch, and when it ended it [us]."""
    mine = [e for e in events if e["pid"] == rank and e["tid"] == 0 and e["ph"] == "X"]
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
            if e["pid"] == rank and e["tid"] == 0 and e.get("cat") == "wait" and begin <= e["ts"] < end
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


def check_terms(check: Check, page: Page, record: Any, steps: list[Any]) -> None:
    prediction, measured = record["prediction"], record["measurement"]
    if not prediction or not measured:
        return
    time, memory = prediction["time"], prediction["memory"]
    loads = [e["seconds"] - e["step_seconds"] for e in steps[WARM_UP:]]
    load = max(0.0, statistics.median(loads))
    step = statistics.median(measured["step_seconds"])
    waits = [one for one in measured["rank_wait_s"] if one is not None]
    wait = statistics.fmean(waits) if waits else None
    held = measured["held_bytes"]
    computing = time["forward_s"] + time["backward_s"] + time["recompute_s"] + time["optimizer_s"]
    waiting = time["bubble_s"] + time["exposed_comm_s"]
    computing_terms: dict[str, tuple[float | None, float | None]] = {
        "computing": (computing, None if wait is None else max(0.0, step - wait - load)), "waiting": (waiting, wait),
    }  # fmt: skip
    if record["plan"]["mode"] != "ranks":
        computing_terms = {"computing and waiting": (computing + waiting, max(0.0, step - load))}
    rest = measured["peak_memory_bytes"] - sum(held.values())
    expected: dict[str, dict[str, tuple[float | None, float | None]]] = {
        "Time of a step": {
            **computing_terms,
            "reading data": (None, load),
            "step": (sum(time.values()), step),
        },
        "Memory at the peak": {
            **{kind: (memory[f"{kind}_bytes"], held.get(kind)) for kind in ("parameters", "gradients", "optimizer")},
            "the rest": (memory["activations_bytes"] + memory["buffers_bytes"], max(0, rest)),
            "peak": (sum(memory.values()), measured["peak_memory_bytes"]),
        },
        "Sent by a rank in a step": {
            axis: (prediction["sent_bytes"].get(axis), measured["sent_bytes"][axis] / measured["num_sent_steps"]
                   if axis in measured["sent_bytes"] else None)
            for axis in {*prediction["sent_bytes"], *measured["sent_bytes"]}
        },
    }  # fmt: skip
    for title, terms in expected.items():
        rows = {row[0]: row for row in page.tables.get(title, [])[1:]}
        for name, (foreseen, found) in terms.items():
            if name not in rows:
                check.same(f"{title}, {name}: left out where nothing is sent", (foreseen or 0, found or 0), (0, 0))
                continue
            check.number(f"{title}, {name}, predicted", rows[name][1], foreseen)
            check.number(f"{title}, {name}, measured", rows[name][2], found)
            check.number(
                f"{title}, {name}, ratio", rows[name][3], found / foreseen if foreseen and found is not None else None
            )


def check_run(folder: Path) -> Check:
    check = Check()
    page = Page((folder / "report.html").read_text())
    steps, evaluations, others = read_events(folder)
    record = json.loads((folder / "record.json").read_text())
    parts: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (check_facts, (steps, evaluations, others["run_started"], record)),
        (check_figures, (steps, evaluations)),
        (check_plan, (record,)),
        (check_step, (folder, others, record["plan"]["mode"] != "ranks")),
        (check_terms, (record, steps)),
    ]
    for part, given in parts:
        part(check, page, *given)
    return check


def main(folders: list[str]) -> int:
    total = wrong = 0
    for folder in folders:
        found = check_run(Path(folder))
        total, wrong = total + found.count, wrong + len(found.wrong)
        print(f"{folder}: {found.count} numbers, {len(found.wrong)} differ")
        for text in found.wrong[:20]:
            print(f"    {text}")
    print(f"{total} numbers computed anew, {wrong} differ")
    return 1 if wrong or not total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
