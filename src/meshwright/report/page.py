"""The report's HTML: one file with its style, script and data in it. Every text from outside is shown as text.

Names come from users' models, plans and files. Jinja escapes them; control characters become visible escapes; data for
the script stands in a JSON element in which `<`, `>`, `&` and all but ASCII are escaped. A content security policy lets
nothing run but the page's own script, by its hash, and lets nothing be loaded.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshwright import __version__
from meshwright.errors import ConfigError, StorageError
from meshwright.report.cost_terms import memory_terms, time_terms, traffic_terms, verdict
from meshwright.report.figures import Figure, every_step, median_load_s, overlay, run_figures
from meshwright.report.pictures import draw_bars, draw_mesh
from meshwright.report.plan_view import view_plan
from meshwright.report.run_files import RunFiles, read_run
from meshwright.report.step_picture import LEFT, TIME_COLUMNS, WIDTH, picture_step
from meshwright.spec.record import Measurement
from meshwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from jinja2 import Template

__all__: list[str] = []

REPORT_FILE: Final = "report.html"
MARK: Final = '<meta name="generator" content="meshwright report">'
"""Text by which a file is known as a report, which a new one may replace."""
MOST_TEXT: Final = 20_000
"""Longest text that is shown whole, a traceback for example [characters]."""
MOST_NAME: Final = 300
"""Longest name that is shown whole [characters]."""

_OUTCOMES: Final = {"finished": "finished", "stopped": "stopped on request", "run_failed": "failed", "failed": "failed"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlans:
    """A comparison of plans, as tables and words.

    Args:
        title: What was compared.
        tables: Rows of cells; the first of each is its head.
        legend: What the columns mean.
        conclusion: The conclusion, or why there is none.
    """

    title: str
    tables: Sequence[Sequence[Sequence[str]]]
    legend: Sequence[str] = ()
    conclusion: str = ""


def write_run_report(path: Path) -> Path:
    """Write a run's report into its folder, and return the file.

    Raises:
        ConfigError: The folder has nothing of a run, or another file in the report's place.
        StorageError: A file cannot be read or written.
    """
    target = path / REPORT_FILE
    write_page(render([read_run(path)]), target)
    return target


def write_page(html: str, target: Path) -> None:
    """Write a page; a reader sees the old one or the new one, never a part.

    Raises:
        ConfigError: There is a file in its place that is not a report.
        StorageError: It cannot be written.
    """
    _refuse_other_files(target)
    partial = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(html)
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise StorageError(f"the report could not be written to {target}: {error.strerror}") from error


def render(runs: Sequence[RunFiles], *, compared: ComparedPlans | None = None, with_every_step: bool = False) -> str:
    """Return the page.

    Args:
        runs: The runs, in the order in which they are shown.
        compared: The plans side by side, with a conclusion.
        with_every_step: Whether the exact numbers of all steps go into the page.
    """
    views = [_run_view(run, f"run{index}", with_every_step=with_every_step) for index, run in enumerate(runs)]
    overlays = _overlays(runs)
    data: dict[str, Any] = {
        "figures": [_figure_data(figure) for figure in (*overlays, *(f for view in views for f in view["figures"]))]
    }
    data["every_step"] = {view["key"]: view["every_step"] for view in views if view["every_step"]}
    style = _asset("vendor/uPlot.min.css") + _asset("page.css")
    licence = _asset("vendor/uPlot.LICENSE").replace("*/", "* /")
    script = f"/* uPlot\n{licence}*/\n{_asset('vendor/uPlot.iife.min.js')}\n{_asset('page.js')}"
    title = views[0]["name"] if len(views) == 1 else (compared.title if compared is not None else f"{len(views)} runs")
    from markupsafe import Markup

    return load_template().render(
        mark=Markup(MARK),  # noqa: S704 - constant
        title=short(title),
        views=views,
        overlays=overlays,
        compared=compared,
        style=Markup(style),  # noqa: S704 - files of this package
        script=Markup(script),  # noqa: S704 - files of this package
        style_hash=csp_hash(style),
        script_hash=csp_hash(script),
        data=Markup(json_for_html(data)),  # noqa: S704 - escaped for a script element
        version=__version__,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


@functools.cache
def load_template() -> Template:
    """Return the page's template, compiled once in a process: that takes a tenth of a second."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("meshwright", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"LEFT": LEFT, "WIDTH": WIDTH, "TIME_COLUMNS": [name for name, _ in TIME_COLUMNS]}
    environment.filters |= {"number": number_text, "short": short, "ratio": _ratio_text}
    return environment.get_template("page.html")


def visible(text: str) -> str:
    """Return a text with control characters, direction marks and lone surrogates as visible escapes.

    >>> visible("a" + chr(27) + "b") == "a" + chr(92) + "x1b" + "b"
    True
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in "\n\t" or _is_shown(one) else one.encode("unicode_escape").decode() for one in text)


def short(text: object, most: int = MOST_NAME) -> str:
    """Return a text that is not too long, and says how long it was."""
    shown = visible(str(text))
    return shown if len(shown) <= most else f"{shown[:most]}... ({len(shown)} characters)"


def json_for_html(data: Any) -> str:
    """Return JSON that can stand in a script element: no tag can end it, no line separator break it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number_text(value: float | None, unit: str = "") -> str:
    """Return a number for a table; "-" for none."""
    if value is None:
        return "-"
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"


def _ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _is_shown(one: str) -> bool:
    # Cc, Cf, Cs: control, format (direction overrides among them), lone surrogates; Zl, Zp: line separators.
    return unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn")


def _refuse_other_files(target: Path) -> None:
    """Refuse to replace a file that is not a report: a name typed wrongly must not cost somebody a file."""
    try:
        if not target.is_symlink() and target.is_file():
            with target.open("rb") as file:
                if MARK.encode() in file.read(4096):
                    return
        elif not target.is_symlink() and not target.exists():
            return
    except OSError as error:
        raise StorageError(f"{target} cannot be read: {error.strerror}") from error
    raise ConfigError(f"{target} is there and is not a report, so it is not replaced", fix="-o with another name")


def _asset(name: str) -> str:
    return resources.files("meshwright.report").joinpath(name).read_text(encoding="utf-8")


def csp_hash(text: str) -> str:
    """Return the hash of a script or style, as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _figure_data(figure: Figure) -> dict[str, Any]:
    data = {**figure.data, "lines": [{**line, "label": short(line["label"], 80)} for line in figure.data["lines"]]}
    return {"key": figure.key, "title": figure.title, "unit": figure.unit, "log": figure.starts_log, **data}


def _overlays(runs: Sequence[RunFiles]) -> list[Figure]:
    if len(runs) < 2:
        return []
    named = [(f"{index + 1}: {run.name}", run) for index, run in enumerate(runs)]
    figures = [
        overlay(named, "all-loss", "Loss of all runs", "loss"),
        overlay(named, "all-time", "Step time of all runs", "seconds", "s"),
    ]
    return [figure for figure in figures if any(row[3] is not None for _, row in figure.rows)]


def _run_view(run: RunFiles, key: str, *, with_every_step: bool) -> dict[str, Any]:
    """Return what the template shows of a run."""
    record, plan = run.record, run.plan
    measurement = record.measurement if record is not None else None
    prediction = record.prediction if record is not None else None
    view: dict[str, Any] = {
        "key": key,
        "name": run.name,
        "path": str(run.path),
        "run": run,
        "plan": plan,
        "plan_view": view_plan(plan, record) if plan is not None else None,
        "mesh": draw_mesh(plan) if plan is not None else None,
        "step": picture_step(run),
        "figures": run_figures(run, key),
        "every_step": every_step(run) if with_every_step else None,
        "facts": _facts(run),
        "outcome": outcome_of(run) or "not ended, or its end was not told: it may be running, or it was killed",
        "remarks": _remarks(run),
        "failures": [event for event in run.remarkable if event["event"] == "failed"],
        "history": [
            _history_line(event) for event in run.remarkable if event["event"] not in ("run_started", "failed")
        ],
        "config": _pretty(record.to_dict()["config"]) if record is not None else "",
        "environment": _pretty(record.to_dict()["environment"]) if record is not None else "",
        "memory_bars": _memory_bars(measurement.rank_peak_memory_bytes if measurement is not None else ()),
        "has_prediction": prediction is not None,
        "terms": [],
    }
    if prediction is not None:
        is_one_process = plan is not None and plan.mode != "ranks"
        time = time_terms(prediction, measurement, median_load_s(run), is_one_process=is_one_process)
        memory = memory_terms(prediction, measurement)
        sent = traffic_terms(prediction, measurement)
        view["terms"] = [
            {"title": "Time of a step", "unit": "s", "terms": time, "verdict": verdict(time, are_bytes=False)},
            {
                "title": "Memory at the peak",
                "unit": "bytes",
                "terms": memory,
                "verdict": verdict(memory, are_bytes=True),
            },
        ]
        if sent:
            why = "Measured: rank 0's mean over all steps of the process, warm-up and evaluations included."
            view["terms"].append({"title": "Sent by a rank in a step", "unit": "bytes", "terms": sent, "verdict": why})
        for table in view["terms"]:
            table["bars"] = _term_bars(table["terms"], table["unit"])
    return view


def _remarks(run: RunFiles) -> list[str]:
    """Return what a curve does not show: steps without a loss, and steps that changed no parameter."""
    remarks: list[str] = []
    for series, word in ((run.steps, "loss"), (run.evaluations, "held-out loss")):
        gaps = [step for step, value in zip(series.steps, series.columns["loss"], strict=True) if math.isnan(value)]
        if gaps:
            remarks.append(
                f"The {word} is not a finite number in {len(gaps):,} of {len(series):,} cases, first at step {gaps[0]}: "
                "a gap in the curve."
            )
    if run.skipped:
        remarks.append(
            f"{len(run.skipped):,} of {len(run.steps):,} steps were skipped, since the loss or a gradient was not finite: "
            f"first step {run.skipped[0]}, last step {run.skipped[-1]}."
        )
    return remarks


def _term_bars(terms: Sequence[Any], unit: str) -> list[Any]:
    pairs: list[tuple[str, float, str]] = []
    for term in terms:
        if not term.is_part:
            for label, value in (("predicted", term.predicted), ("measured", term.measured)):
                pairs.append((f"{term.name}, {label}", value or 0.0, number_text(value, unit)))
    return draw_bars(pairs)


def _memory_bars(peaks: Sequence[int]) -> list[Any]:
    return draw_bars([(f"rank {rank}", peak, format_bytes(peak)) for rank, peak in enumerate(peaks[:256])])


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    """Return the run's numbers, as record.json has them: name and text."""
    record, start = run.record, run.start
    facts: list[tuple[str, str]] = [
        ("plan", str(run.plan) if run.plan is not None else short(start.get("plan", "not told")))
    ]
    facts += [("steps done", str(run.steps.steps[-1]) if len(run.steps) else "0")]
    for key, label in (
        ("num_parameters", "parameters"),
        ("global_batch_size", "samples in a step"),
        ("device", "device"),
    ):
        value = start.get(key)
        if value is not None:
            facts.append((label, f"{value:,}" if isinstance(value, int) else short(value)))
    measurement = record.measurement if record is not None else None
    if run.skipped:
        facts.append(("skipped steps", f"{len(run.skipped):,}"))
    recorded = measurement.loss if measurement is not None else None
    for label, series, of_record in (
        ("last loss", run.steps, recorded),
        ("last held-out loss", run.evaluations, None),
    ):
        value = of_record
        if value is None and len(series):  # of a killed run, which has no measurement
            value = series.columns["loss"][-1]
        if series.since_when_not_finite("loss") is not None:
            facts.append((label, "not a finite number"))
        elif value is not None:
            facts.append((label, f"{value:.6g}"))
    return facts + _measured_facts(run, measurement)


def _measured_facts(run: RunFiles, measurement: Measurement | None) -> list[tuple[str, str]]:
    record = run.record
    facts: list[tuple[str, str]] = []
    if measurement is None:
        return facts
    if (step_s := measurement.step_s) is not None:
        facts.append(("median step", format_seconds(step_s)))
    for label, rate in (("samples/s", measurement.samples_per_s), ("tokens/s", measurement.tokens_per_s)):
        if rate:
            facts.append((label, f"{rate:,.1f}"))
    if measurement.peak_memory_bytes is not None:
        facts.append(("peak memory, fullest rank", format_bytes(measurement.peak_memory_bytes)))
    if record is not None and record.step_time_ratio is not None:
        facts.append(("step time, measured over predicted", f"{record.step_time_ratio:.2f}"))
    return facts


def outcome_of(run: RunFiles) -> str | None:
    """Return how the run ended, as its events tell it; None where they tell no end."""
    for event in reversed(run.remarkable):
        kind = event["event"]
        if kind in _OUTCOMES:
            cause = event.get("cause") or event.get("text") or event.get("reason")
            return f"{_OUTCOMES[kind]}{f': {short(cause)}' if cause else ''}"
        if kind in ("run_started", "resumed", "restarting"):
            break
    return None


def _history_line(event: Mapping[str, Any]) -> str:
    details = [
        f"{key} {short(value, 200)}"
        for key, value in event.items()
        if key not in ("event", "time") and value is not None
    ]
    return f"{short(event['event'])}: {', '.join(details)}"


def _pretty(data: Any) -> str:
    return short(json.dumps(data, indent=1, ensure_ascii=False), MOST_TEXT)
