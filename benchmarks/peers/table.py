"""The README's tables in Markdown, computed anew from the raw samples of result files."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cases import CASES
from kinds import KINDS
from rounds import OTHERS_LIMIT
from summary import summarise

LABELS = {
    "ddp": "DistributedDataParallel",
    "ddp-view": "DistributedDataParallel, `gradient_as_bucket_view`",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "deepspeed": "DeepSpeed, stage 0",
    "one-process": "one plain process, 2 threads",
    "zero-redundancy": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "deepspeed-1": "DeepSpeed, stage 1",
    "deepspeed-2": "DeepSpeed, stage 2",
    "deepspeed-3": "DeepSpeed, stage 3",
    "dtensor": "DTensor, `parallelize_module`",
    "transformers": "transformers, `tp_plan`",
    "torch-gpipe": "torch, ScheduleGPipe",
    "torch-1f1b": "torch, Schedule1F1B",
    "torch-interleaved": "torch, ScheduleInterleaved1F1B",
    "torch-zbv": "torch, ScheduleZBVZeroBubble",
    "deepspeed-pipeline": "DeepSpeed, PipelineModule",
}
TRANSPORTS = {"shm": "shared memory", "gloo": "gloo"}
LEGEND = (
    "Milliseconds a step, medians. Behind ours: its ratio to the fastest other library (bold), median and quartiles of\n"
    "the rounds. Behind the others: the first row's ratio to it."
)


@dataclasses.dataclass
class Result:
    """One case as it was measured last."""

    summary: dict[str, Any]
    environment: dict[str, Any]
    versions: dict[str, str]
    options: str
    path: Path


def files_of(paths: Iterable[Path]) -> list[Path]:
    return [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


def read_results(paths: Iterable[Path]) -> dict[str, dict[str, Result]]:
    """Return the results by kind and case; where several files have the same, the newest counts."""
    found: dict[str, dict[str, Result]] = {}
    for file in files_of(paths):
        record = json.loads(file.read_text())
        kind = record["options"].get("kind", "distributed")  # the first results were of this one
        for case, result in record["results"].items():
            versions = {}
            for start in result["starts"]:
                for facts in start["sides"].values():
                    versions |= facts["versions"]
            summary = summarise(case, KINDS[kind], result["starts"])
            entry = Result(summary, record["environment"], versions, unusual(record["options"]), file)
            older = found.setdefault(kind, {}).get(case)
            if older is None or older.environment["date"] <= entry.environment["date"]:
                found[kind][case] = entry
    return found


def unusual(options: dict[str, Any]) -> str:
    """Return what is not as each side comes, where it was asked for."""
    words = [f"--settings {options['settings']}"] if options.get("settings") else []  # older results have no such key
    words += [] if options["optimizer"] == "adamw" else [f"--optimizer {options['optimizer']}"]
    words += ["--keep-freed-memory"] if options["keep_freed_memory"] else []
    return f" ({' '.join(words)})" if words else ""


def label(side: str) -> str:
    if not side.startswith("ours-"):
        return LABELS.get(side, side)
    _, transport, *schedule = side.split("-", 2)
    return ", ".join(["ours", TRANSPORTS[transport], *schedule])


def spread(quartiles: list[float]) -> str:
    low, median, high = quartiles
    return f"{median:.3f} [{low:.3f}, {high:.3f}]"


def cell(side: str, summary: dict[str, Any]) -> str:
    row = summary["rows"].get(side)
    if row is None:
        return "left out" if side in summary["unavailable"] else ""
    text = f"{row['step_ms'][1]:.1f} ms"
    if side == summary["best"]:
        text = f"**{text}**"
    ratio = row.get("ratio_to_best") if side.startswith("ours") else row.get("ratio")
    if ratio:
        text += f", {spread(ratio)}"
    if "bound" in row:
        text += f"; target {row['bound']:.2f}, {'met' if row['met'] else 'missed'}"
    return text


def remarks(results: dict[str, Result]) -> Iterable[str]:
    """Say what a reader must know beside the figures, file by file."""
    for path in dict.fromkeys(result.path for result in results.values()):
        cases = {case: result for case, result in results.items() if result.path == path}
        first = next(iter(cases.values()))
        versions: dict[str, str] = {}
        for result in cases.values():
            versions |= result.versions
        libraries = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        machine = f"{first.environment['date'][:10]}, {first.environment['cores']} cores, {first.environment['cpu']}"
        figures = "; ".join(remark(case, result.summary) for case, result in cases.items())
        yield wrap(f"- `{path.name}`{first.options}: {machine}; {libraries}; {figures}.")
        for case, result in cases.items():
            for name, reason in result.summary["unavailable"].items():
                yield wrap(f"- {case}, left out: {label(name)}: {reason}")


def wrap(text: str) -> str:
    return textwrap.fill(text, 130, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def remark(case: str, summary: dict[str, Any]) -> str:
    worst = max((row.get("loss_difference", 0.0) for row in summary["rows"].values()), default=0.0)
    text = f"{case} {summary['num_counted']} rounds, losses of the first steps within {worst:.0e}"
    if not summary["losses_agree"]:
        text += " (**they differ**)"
    if summary["others_cores"] > OTHERS_LIMIT:
        text += f", **not alone**: the rest of the machine took {summary['others_cores']:.2f} cores"
    return text


def markdown(results: dict[str, dict[str, Result]]) -> str:
    lines = [LEGEND, ""]
    for kind in (kind for kind in KINDS if kind in results):
        cases = {case: results[kind][case] for case in CASES if case in results[kind]}
        sides = dict.fromkeys(
            side for result in cases.values() for side in (*result.summary["rows"], *result.summary["unavailable"])
        )
        ordered = sorted(sides, key=lambda side: (not side.startswith("ours"), side == "one-process"))
        lines += [f"| `{kind}` | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
        lines += [
            f"| {label(side)} | {' | '.join(cell(side, cases[case].summary) for case in cases)} |" for side in ordered
        ]
        lines += ["", *remarks(cases), ""]
    return "\n".join(lines)


def print_tables(paths: Iterable[Path]) -> None:
    print(markdown(read_results(paths)))
