"""Verdict on an event of the campaign, and the table of all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.faults.events import ERRORS, HANG_S, LOSS, codes, guilty, is_death, is_hang, is_stop

LIMIT_S = 3.0
GROUPS = ("deaths", "exceptions", "hangs", "stops", "wires", "packet loss", "agents", "launchers", "limits")


def group_of(kind: str) -> str:
    """Return the row of the table that a kind of event belongs to."""
    if kind == LOSS:
        return "packet loss"
    if kind.startswith(("wire", "agent")) or kind == "launcher SIGKILL":
        return f"{kind.partition(' ')[0]}s"
    if is_stop(kind):
        return "stops"
    if kind.removeprefix("forward ") in ERRORS:
        return "exceptions"
    return "deaths" if is_death(kind) else "hangs" if is_hang(kind) else "limits"


def judge(row: dict[str, Any]) -> list[str]:
    """Return what is wrong about an event's end."""
    if "trouble" in row:
        return [row["trouble"]]
    wrong = [f"left: {row['left']}"] if row["left"] else []
    if row["entry"] in ("launch", "command"):
        return wrong + _judge_launched(row)
    if row["entry"] == "own":
        named = [int(line["rank"]) if line["rank"].isdigit() else line["rank"] for line in row["fatal"]]
        return wrong + _judge_launched(row | {"code": row["codes"][0], "named": named})
    return wrong + _judge_job(row)


def _judge_launched(row: dict[str, Any]) -> list[str]:
    wrong, expected = [], guilty(row)
    if row["code"] not in codes(row["kind"]):
        wrong.append(f"exit code {row['code']}, not one of {codes(row['kind'])}")
    if expected and (len(row["named"]) != 1 or row["named"][0] not in expected):
        wrong.append(f"named {row['named']}, not one of {expected}")
    return wrong


def _judge_job(row: dict[str, Any]) -> list[str]:
    """Judge ranks of a job: whoever writes a line names the rank, and where one is at fault somebody writes one."""
    wrong, expected = [], {str(rank) for rank in guilty(row)}
    kind, named = row["kind"], {line["rank"] for line in row["fatal"]}
    if not row["in_time"]:
        wrong.append("still there at the outer limit")
    if kind == LOSS:
        if set(row["codes"]) != {75} and row["launcher"] != "torchrun":
            wrong.append(f"ended with {row['codes']}, not 75")
        if row["steps_meanwhile"] < 1:
            wrong.append("no step while packets were lost")
        return wrong + ([f"named {sorted(named)}"] if named else [])
    if row["codes"].count(0) > ("_exit(0)" in kind):
        wrong.append(f"ended with 0: {row['codes']}")
    if kind.startswith("wire"):
        # Each side sees the other's ranks vanish: the first of them is named, and rank 0 for the store.
        other_side = {line.get("of", -1): line["rank"] for line in row["fatal"]}
        if any((of < 2) == (int(rank) < 2) for of, rank in other_side.items() if of >= 0 and rank.isdigit()):
            wrong.append(f"a rank of its own side is named: {other_side}")
        expected = {"0", "2"}
    elif kind.startswith("agent"):
        expected = {str(rank) for rank in ((0, 1) if row["rank"] < 2 else (2, 3))} if row["entry"] == "hosts" else named
    if not named and not kind.startswith("agent"):
        wrong.append("nobody is named")
    if not named <= expected:
        wrong.append(f"named {sorted(named)}, not one of {sorted(expected)}")
    return wrong


def seconds_of(row: dict[str, Any]) -> float | None:
    """Return how long after its fault the last process ended; of hangs how long after the limit [s]."""
    found = row.get("seconds_beyond_limit", row.get("seconds"))
    if isinstance(found, list):
        found = max(found) if found and None not in found else None
        if found is not None and is_hang(row["kind"]):
            found -= HANG_S
    return found


def seconds_of_ranks(row: dict[str, Any]) -> float | None:
    """Return how long after its fault the last other rank of a job had ended: without what torchrun's agent takes [s]."""
    return None if is_hang(row["kind"]) else row.get("ranks_seconds")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the README."""
    lines = [
        "| entry | event | events | right | something left | seconds: median, 95th percentile, largest | of the ranks alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in ("launch", "command", "own", "torchrun", "hosts"):
        for group in GROUPS:
            chosen = [row for row in rows if row["entry"] == entry and group_of(row["kind"]) == group]
            if not chosen:
                continue
            times = sorted(seconds for row in chosen if (seconds := seconds_of(row)) is not None)
            figures = "" if not times else _figures(times)
            alone = sorted(seconds for row in chosen if (seconds := seconds_of_ranks(row)) is not None)
            of_ranks = _figures(alone) if alone else ""
            right = sum(not row["wrong"] for row in chosen)
            left = sum(bool(row.get("left")) for row in chosen)
            lines.append(f"| {entry} | {group} | {len(chosen)} | {right} | {left} | {figures} | {of_ranks} |")
    return "\n".join(lines)


def _figures(times: list[float]) -> str:
    return f"{statistics.median(times):.2f}, {times[math.ceil(0.95 * (len(times) - 1))]:.2f}, {times[-1]:.2f}"


def brief(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a result file keeps of an event."""
    names = (
        "entry",
        "seed",
        "launcher",
        "plan",
        "transport",
        "kind",
        "rank",
        "delay_s",
        "seconds",
        "load",
        "wrong",
        "ranks_seconds",
    )
    kept = {name: row[name] for name in names if name in row}
    kept["codes"] = row.get("codes", row.get("code"))
    kept["named"] = row.get("named", [line["rank"] for line in row.get("fatal", ())])
    if row["kind"] == "two SIGKILL":
        kept["second"] = row["second"]
    return {name: value for name, value in kept.items() if value not in ([], {}, "")}
