"""The figures of one case, from its raw samples, and how they are printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from kinds import BOUND_TO_ONE_PROCESS, Kind
from rounds import OTHERS_LIMIT

CHECKED_STEPS = 10
"""Losses of these first steps must agree; later ones drift apart by rounding, which training makes grow [count]."""
LOSS_TOLERANCE = 1e-5
IDLE_LIMIT = 0.01
"""What a waiting process may take of a core: beyond it the sides would not have been alone."""

Start = dict[str, Any]
"""What one start of all sides measured, see `measure.run_start`."""


def quartiles(values: Iterable[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    values = list(values)
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def loss_difference(starts: list[Start], mine: str, other: str, count: int | None = None) -> float:
    """Return the greatest relative difference of two sides' losses, over all starts and the first `count` steps."""
    return max(
        abs(my_loss - their_loss) / abs(their_loss)
        for start in starts
        for my_loss, their_loss in zip(start["losses"][mine][:count], start["losses"][other][:count], strict=True)
    )


def summarise(case: str, kind: Kind, starts: list[Start]) -> dict[str, Any]:
    """Return the figures of one case. Sides that did not run in every start are left out."""
    rounds = [entry for start in starts for entry in start["rounds"]]
    counted = [entry for entry in rounds if entry["counts"]]
    names = [name for name in starts[0]["sides"] if all(name in start["sides"] for start in starts)]
    times = {name: [entry["blocks"][name]["step_s"] for entry in counted] for name in names}
    subject = next((name for name in names if name.startswith("ours")), None)  # the first that was asked for
    libraries = [name for name in names if not name.startswith("ours") and name != "one-process"]
    best = min(libraries, key=lambda name: statistics.median(times[name]), default=None)
    rows = {}
    for name in names:
        faults = statistics.median(entry["blocks"][name]["page_faults_per_step"] for entry in counted)
        row: dict[str, Any] = {"step_ms": [1e3 * value for value in quartiles(times[name])]}
        row["page_faults_per_step"] = faults
        if subject is not None and name != subject:
            row["ratio"] = ratio(times, subject, name)
            row["loss_difference"] = loss_difference(starts, subject, name, CHECKED_STEPS)
            row["loss_difference_at_end"] = loss_difference(starts, subject, name)
        if name.startswith("ours") and best is not None:
            row["ratio_to_best"] = ratio(times, name, best)
            add_bound(row, row["ratio_to_best"], kind.bounds_of(name).get(case))
        if name == "one-process" and "ratio" in row:
            add_bound(row, row["ratio"], BOUND_TO_ONE_PROCESS.get(case))
        rows[name] = row
    differences = [row["loss_difference"] for row in rows.values() if "loss_difference" in row]
    return {
        "subject": subject,
        "best": best,
        "rows": rows,
        "unavailable": {name: why for start in starts for name, why in start.get("unavailable", {}).items()},
        "losses_agree": max(differences, default=0.0) <= LOSS_TOLERANCE,
        "idle_cores": max(share for start in starts for share in start["idle_cores"].values()),
        "others_cores": statistics.fmean(entry["others_cores"] for entry in counted),
        "num_counted": len(counted),
        "num_disturbed": len(rounds) - len(counted),
    }


def ratio(times: dict[str, list[float]], mine: str, other: str) -> list[float]:
    """Return the quartiles of one side's time over another's, round by round."""
    return quartiles(my_time / their_time for my_time, their_time in zip(times[mine], times[other], strict=True))


def add_bound(row: dict[str, Any], quartiles_of_ratio: list[float], bound: float | None) -> None:
    if bound is not None:
        row |= {"bound": bound, "met": quartiles_of_ratio[1] <= bound}


def print_summary(case: str, summary: dict[str, Any]) -> None:
    for name, row in summary["rows"].items():
        low, median, high = row["step_ms"]
        faults = row["page_faults_per_step"]
        text = f"{case:16s} {name:20s} {median:8.1f} ms [{low:.1f}, {high:.1f}]  faults {faults:6.0f}"
        if "ratio" in row:
            low, median, high = row["ratio"]
            text += f"  first/side {median:.3f} [{low:.3f}, {high:.3f}]  loss {row['loss_difference']:.0e}"
        if "ratio_to_best" in row:
            low, median, high = row["ratio_to_best"]
            text += f"  side/best {median:.3f} [{low:.3f}, {high:.3f}]"
        if name == summary["best"]:
            text += "  best"
        if "bound" in row:
            text += f"  bound {row['bound']:.2f} {'met' if row['met'] else 'MISSED'}"
        print(text)
    for name, reason in summary["unavailable"].items():
        print(f"{case:16s} {name:20s} left out: {reason}")
    idle, others = summary["idle_cores"], summary["others_cores"]
    notes = [
        f"{summary['num_counted']} rounds, {summary['num_disturbed']} more disturbed",
        f"a waiting process took {idle:.4f} of a core{': TOO MUCH' if idle > IDLE_LIMIT else ''}",
        f"all else on the machine {others:.2f}{': NOT ALONE, measure again' if others > OTHERS_LIMIT else ''}",
    ]
    if not summary["losses_agree"]:
        notes.append("LOSSES DIFFER")
    print(f"{case:16s} {'; '.join(notes)}", flush=True)
