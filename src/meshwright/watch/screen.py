"""The view of a run in a terminal: outcome, loss curve, step time, ranks and memory, who is late."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshwright.report.page import visible
from meshwright.spec.rank_states import RankActivity
from meshwright.units import format_bytes, format_seconds
from meshwright.watch.follow import WatchedRun

__all__: list[str] = []

MOST_RANKS = 32
"""Ranks that are listed; of more, the late ones and the first [count]."""
_LARGEST_DRAWN = 1e150
_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"


def view(watched: WatchedRun, *, width: int = 100, height: int = 12, ascii_only: bool = False) -> RenderableType:
    """Return the view of a run.

    Args:
        watched: The run.
        width: Columns of the terminal [count].
        height: Lines of the curve [count].
        ascii_only: Whether the terminal shows nothing else.
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    parts: list[RenderableType] = [_head(watched), Text(verdict(watched), style=_style(watched))]
    run = watched.run
    if len(run.steps):
        parts.append(Panel(_curve(watched, max(20, width - 4), height, bars), title="loss", title_align="left"))
        parts.append(_numbers(watched, bars))
    if watched.states is not None:
        parts.append(_ranks(watched))
    elif watched.run.start:
        parts.append(Text("what the ranks do has not been told yet"))
    parts += [Text(visible(problem), style="yellow") for problem in run.problems if "record.json" not in problem]
    return Group(*parts)


def verdict(watched: WatchedRun) -> str:
    """Return how the run is, and which rank the others wait for."""
    text = visible(watched.outcome)
    late, states = list(watched.late), watched.states
    if not late or states is None:
        return text
    names = ", ".join(map(str, late[:8])) + (", ..." if len(late) > 8 else "")
    one = states.ranks[late[0]]
    doing = f"{_doing(watched, late[0])[0]}, no progress for {format_seconds(one.progress_s)}"
    waiting = format_seconds(states.longest_wait_s)
    word = "rank" if len(late) == 1 else "ranks"
    if watched.is_over:
        return f"{text}. At the last look the others had waited for {word} {names} ({doing}) for {waiting}"
    return f"{text}. The others wait for {word} {names} ({doing}), for {waiting} so far"


def _style(watched: WatchedRun) -> str:
    if watched.late or watched.outcome.startswith(("killed", "failed")):
        return "bold red"
    return "yellow" if watched.is_quiet else "green"


def _head(watched: WatchedRun) -> Text:
    run, start = watched.run, watched.run.start
    words = [visible(run.name)]
    if start:
        words.append(f"plan {visible(str(start.get('plan', '?')))}")
    if len(run.steps):
        total = start.get("steps")
        words.append(f"step {run.steps.steps[-1]}" + (f" of {total}" if isinstance(total, int) else ""))
    return Text(", ".join(words)[:400], style="bold")


def _numbers(watched: WatchedRun, bars: str) -> Text:
    steps = watched.run.steps
    cells: list[str] = []
    for name, label, unit in (
        ("loss", "loss", ""),
        ("seconds", "step", "s"),
        ("tokens_per_s", "tokens/s", ""),
        ("grad_norm", "gradient norm", ""),
        ("peak_memory_bytes", "peak memory, rank 0", "bytes"),
    ):
        value = steps.columns[name][-1]
        if name == "loss" and math.isnan(value):
            cells.append(f"loss not a finite number since step {steps.since_when_not_finite(name)}")
        elif not math.isnan(value):
            text = format_seconds(value) if unit == "s" else format_bytes(value) if unit else f"{value:,.5g}"
            cells.append(f"{label} {text}")
    evaluations = watched.run.evaluations
    if len(evaluations):
        cells.append(f"held-out loss {evaluations.columns['loss'][-1]:.5g} (step {evaluations.steps[-1]})")
    seconds = [value for value in steps.columns["seconds"][-200:] if not math.isnan(value)]
    if len(seconds) > 1:
        cells.append(f"step times {spark(seconds, 30, bars)}")
    return Text("   ".join(cells))


def _curve(watched: WatchedRun, width: int, height: int, bars: str) -> Text:
    steps = watched.run.steps
    pairs = [
        (step, value) for step, value in zip(steps.steps, steps.columns["loss"], strict=True) if not math.isnan(value)
    ]
    if len(pairs) < 2:
        return Text("too few steps for a curve")
    lowest = min(value for _, value in pairs)
    stride = math.ceil(len(pairs) / (2 * width))
    pairs = [*pairs[::stride], pairs[-1]]
    values = [value for _, value in pairs]
    try:
        from plotext import build, clear_figure, plot, plotsize, theme  # pyright: ignore

        if bars is _ASCII_BARS or max(map(abs, values)) > _LARGEST_DRAWN:
            raise ImportError
    except ImportError:  # not there, or of another major release; or it cannot show these
        (first, _), (last, value) = pairs[0], pairs[-1]
        told = f"{values[0]:.5g} at step {first}, {value:.5g} at step {last}; lowest {lowest:.5g}"
        return Text(f"{spark(values, width, bars)}\n{told}   (a curve with axes: pip install meshwright[watch])")
    clear_figure()
    theme("clear")
    plotsize(width, height)
    plot([step for step, _ in pairs], values, marker="braille")
    return Text.from_ansi(build())


def spark(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """Return a line of bars, the lowest value as the lowest bar; any finite values.

    >>> spark([1, 2, 3], 10)
    '▁▅█'
    """
    size = max(1, math.ceil(len(values) / width))
    # In parts of the whole: a sum or a difference of the largest numbers would overflow.
    largest = max(map(abs, values), default=0.0) or 1.0
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    means = [sum(value / largest / len(group) for value in group) for group in groups]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(bars) - 2) / (high - low) if high - low > 1e-300 else 0.0
    return "".join(bars[1 + min(len(bars) - 2, math.floor((value - low) * scale + 0.5))] for value in means)


def _ranks(watched: WatchedRun) -> Table:
    states, late = watched.states, set(watched.late)
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "process", "step", "does", "for", "memory"):
        table.add_column(name, justify="left" if name == "does" else "right")
    ranks = () if states is None else states.ranks
    shown = [rank for rank in range(len(ranks)) if rank < MOST_RANKS or rank in late][: 2 * MOST_RANKS]
    age = "" if watched.silent_s < 3 else f"as of {format_seconds(watched.silent_s)} ago"
    for rank in shown:
        one = ranks[rank]
        does, since = _doing(watched, rank)
        style = "bold red" if rank in late else ""
        mark = " <- late" if rank in late else ""
        memory = format_bytes(one.rss_bytes) if one.rss_bytes else "-"
        step = "-" if one.step < 0 else str(one.step + 1)
        cells = (_place(rank, one), str(one.pid), step, f"{does}{mark}", format_seconds(since), memory)
        table.add_row(*map(Text, cells), style=style)  # as text: brackets in a name are no markup
    if len(shown) < len(ranks):
        table.add_row("...", "", "", f"{len(ranks) - len(shown)} more ranks", "", "")
    table.caption = age or None
    return table


def _place(rank: int, one: RankActivity) -> str:
    return f"{rank} on {visible(one.host)[:40]}" if one.host else str(rank)


def _doing(watched: WatchedRun, rank: int) -> tuple[str, float]:
    one: RankActivity = watched.states.ranks[rank]  # pyright: ignore[reportOptionalMemberAccess] - it is asked for a row of them
    phase = visible(one.phase) + (", stopped (SIGSTOP or a debugger)" if rank in watched.stopped else "")
    if one.wait_s is None:
        return phase, one.progress_s
    return f"{phase}: waits in {visible(one.collective)}", one.wait_s


def as_data(watched: WatchedRun) -> dict[str, Any]:
    """Return the same as plain data, for the browser."""
    states = watched.states
    late = set(watched.late)
    rows: list[list[str]] = []
    for rank, one in enumerate(states.ranks[:256] if states is not None else ()):
        does, since = _doing(watched, rank)
        step = "-" if one.step < 0 else str(one.step + 1)
        size = format_bytes(one.rss_bytes)
        rows.append([_place(rank, one), step, does, format_seconds(since), size, "late" if rank in late else ""])
    steps = watched.run.steps
    return {
        "verdict": verdict(watched),
        "is_bad": _style(watched) != "green",
        "is_over": watched.is_over,
        "step": steps.steps[-1] if len(steps) else 0,
        "head": _head(watched).plain,
        "ranks": rows,
        "time": time.strftime("%H:%M:%S"),
    }
