"""From samples to the table: medians, quartiles, ratios pair by pair, and the targets that were set before measuring."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

KIB, MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True)
class Target:
    """What a ratio must reach: at least, where the peer's time is over ours; at most, where ours is over its."""

    value: float
    at_least: bool

    def met(self, ratio: float) -> bool:
        return ratio >= self.value if self.at_least else ratio <= self.value

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.value:g}"


def _at_least(value: float) -> Target:
    return Target(value, at_least=True)


def _at_most(value: float) -> Target:
    return Target(value, at_least=False)


# Keys: against what, on how many ranks, which operation, how many bytes.
TARGETS = {
    ("gloo", 2, "all_reduce", KIB): _at_least(40),
    ("gloo", 2, "all_reduce", MIB): _at_least(8),
    ("gloo", 2, "all_reduce", 16 * MIB): _at_least(2.5),
    ("gloo", 4, "all_reduce", KIB): _at_least(8),
    ("gloo", 4, "all_reduce", MIB): _at_least(6),
    ("gloo", 4, "all_reduce", 16 * MIB): _at_least(2.5),
    **{("gloo", ranks, "send_recv", MIB): _at_least(5) for ranks in (2, 4)},
    **{("copies", ranks, "all_reduce", 16 * MIB): _at_most(2) for ranks in (2, 4)},
    ("openmpi", 2, "all_reduce", KIB): _at_most(8),
    **{("openmpi", 2, "all_reduce", num_bytes): _at_most(1.3) for num_bytes in (64 * KIB, MIB, 16 * MIB)},
    ("openmpi", 4, "all_reduce", KIB): _at_most(10),
    **{("openmpi", 4, "all_reduce", num_bytes): _at_most(1.5) for num_bytes in (64 * KIB, MIB)},
    ("openmpi", 4, "all_reduce", 16 * MIB): _at_most(0.8),
}


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def comparisons(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one line for each side that the left one is compared with; `row` is a case as the ranks return it."""
    lines = []
    samples = row["samples_s"]
    for side in samples:
        if side == "left":
            continue
        against = row["peer"] if side == "peer" else side
        is_gain = against == "gloo"
        pairs = zip(samples["left"], samples[side], strict=True)
        low, ratio, high = quartiles([other / left if is_gain else left / other for left, other in pairs])
        target = TARGETS.get((against, row["ranks"], row["op"], row["bytes"]))
        lines.append(
            {
                "ranks": row["ranks"],
                "op": row["op"],
                "bytes": row["bytes"],
                "against": against,
                "left_us": 1e6 * statistics.median(samples["left"]),
                "against_us": 1e6 * statistics.median(samples[side]),
                "ratio_is": f"{against}/{row['left']}" if is_gain else f"{row['left']}/{against}",
                "ratio": ratio,
                "ratio_quartiles": [low, high],
                "target": None if target is None else str(target),
                "met": None if target is None else target.met(ratio),
            }
        )
    return lines


def size_text(num_bytes: int) -> str:
    if num_bytes >= MIB:
        return f"{num_bytes // MIB} MiB"
    return f"{num_bytes // KIB} KiB" if num_bytes else "-"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def table(lines: Sequence[dict[str, Any]], left: str) -> str:
    """Return the table as plain text; times in microseconds a call."""
    head = ("ranks", "op", "bytes", "against", f"{left} us", "its us", "ratio", "quartiles", "is", "bound", "")
    rows = [head]
    for line in lines:
        low, high = line["ratio_quartiles"]
        rows.append(
            (
                str(line["ranks"]),
                line["op"],
                size_text(line["bytes"]),
                line["against"],
                f"{line['left_us']:.1f}",
                f"{line['against_us']:.1f}",
                _number(line["ratio"]),
                f"[{_number(low)}, {_number(high)}]",
                line["ratio_is"],
                line["target"] or "",
                "" if line["met"] is None else "met" if line["met"] else "missed",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    is_number = [column in (0, 2, 4, 5, 6) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in rows
    )
