"""Computes every number of reports anew, from a run's files alone: `recompute.py RUN_DIR...`

It shares no code with the report: files are read as plain JSON, the page as plain HTML, statistics come from Python's own module.
A text such as "84.8 ms" is held to the digits that it shows.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shown import Check, Page
from traced_step import check_step

WARM_UP = 3
BLOCK = 8
FIGURES = {
    "loss": "loss", "tokens": "tokens_per_s", "samples": "samples_per_s", "norm": "grad_norm", "memory": "peak_memory_bytes",
    "rate": "lr",
}  # fmt: skip


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
        if key in start:  # made-up runs do not tell all
            check.same(label, facts.pop(label), f"{start[key]:,}")
    measured = record["measurement"] or {}
    seconds = measured.get("step_seconds") or []
    expected: dict[str, float | None] = {}
    if seconds:
        expected = {
            "median step": statistics.median(seconds),
            "samples/s": measured["num_samples"] / sum(seconds),
            "peak memory, fullest rank": measured["peak_memory_bytes"],
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
    expected["last loss"] = steps[-1]["loss"]
    if evaluations:
        expected["last held-out loss"] = evaluations[-1]["loss"]
    if record["prediction"] and seconds:
        expected["step time, measured over predicted"] = statistics.median(seconds) / predicted_step(record)
    for name, value in expected.items():
        check.number(name, facts.pop(name, None), value)
    check.same("plan", facts.pop("plan"), start["plan"])
    check.same("device", facts.pop("device"), start["device"])
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
        if "stage" in rows[0]:
            check.same(f"stage of {row[0]}", row[2], stage_of(record["plan"]["stages"], row[0]))
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


def stage_of(stages: dict[str, int], layer: str) -> str:
    """Return the stage of the layer, or of one that it lies in."""
    return next((str(stage) for name, stage in stages.items() if f"{layer}.".startswith(f"{name}.")), "-")


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
    parts = {
        "Time of a step": {
            **{kind: time[f"{kind}_s"] for kind in ("forward", "backward", "recompute", "optimizer")},
            "pipeline bubble": time["bubble_s"], "exposed communication": time["exposed_comm_s"],
        },
        "Memory at the peak": {
            "activations": memory["activations_bytes"], "buffers, workspaces, process": memory["buffers_bytes"],
        },
    }  # fmt: skip
    for title, found_parts in parts.items():
        rows = {row[0]: row for row in page.tables[title][1:]}
        for name, foreseen in found_parts.items():
            check.number(f"{title}, {name}, predicted", rows[name][1], foreseen)
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
