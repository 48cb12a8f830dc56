"""Tables of a sweep: verdicts by plan, what is cut, how long the search takes, and what is not equal, by cause.

python -m benchmarks.any_model.table benchmarks/any_model/results/cells.jsonl [--cells] [--causes 12]
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
from pathlib import Path
from typing import Any

VERDICTS = ("equal", "refused", "caught", "told", "wrong", "hung", "crashed")


def latest(path: Path) -> list[dict[str, Any]]:
    """Return the last row of each cell."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows[row["type"], row["plan"]] = row
    return list(rows.values())


def by_plan(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each plan: counts of verdicts, what is cut, and times of searches."""
    lines = [
        f"| plan | cells | {' | '.join(VERDICTS)} | equal | equal and drawing "
        "| at least 90 % of block parameters cut | search under 10 s of processor time |",
        "|" + "---|" * (len(VERDICTS) + 6),
    ]
    for name in dict.fromkeys(row["plan"] for row in rows):
        own = [row for row in rows if row["plan"] == name]
        counts = collections.Counter(row["verdict"] for row in own)
        cuts = [row["cut_of_blocks"] for row in own if "cut_of_blocks" in row and row["verdict"] == "equal"]
        cut = f"{sum(c >= 0.9 for c in cuts)} of {len(cuts)}, median {statistics.median(cuts):.2f}" if cuts else "-"
        leaning = sum(row.get("cut_of_blocks", 0.0) >= 0.9 > _without_stored(row) for row in own)
        cut += f"; {leaning} of them by parts that are put together" if leaning else ""
        # A first step holds the search, further proofs and trials: an upper bound where the search was not timed by itself.
        times = [row.get("search_cpu_s", row.get("first_step_cpu_s")) for row in own if "cut_of_blocks" in row]
        known = [seconds for seconds in times if seconds is not None]
        quick = f"{sum(s < 10 for s in known)} of {len(known)}, largest {max(known):.1f} s" if known else "-"
        numbers = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
        drawing = sum(row.get("draws", False) and row["verdict"] == "equal" for row in own)
        share = f"{counts['equal'] / len(own):.1%}"
        lines.append(f"| {name} | {len(own)} | {numbers} | {share} | {drawing} | {cut} | {quick} |")
    return lines


def _without_stored(row: dict[str, Any]) -> float:
    """Return the share of block parameters that ranks compute with in parts [fraction]."""
    return row.get("cut_of_blocks", 0.0) - row.get("stored_of_blocks", 0.0)


def cause_of(row: dict[str, Any]) -> str:
    """Return the text of a cell without what differs from one architecture to the next."""
    text = re.sub(r"rank \d+( raised| of \d+)?:?", "rank N", row["text"].split("\n")[0])
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'X'", text)
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)
    return f"{row['verdict']}: {text[:150]}"


def causes(rows: list[dict[str, Any]], most: int) -> list[str]:
    """Return the causes of cells that are not equal, from the most frequent down, with their architectures."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        if row["verdict"] != "equal":
            found[cause_of(row)].append(row)
    lines = ["| cells | cause | where |", "|---|---|---|"]
    for cause, own in sorted(found.items(), key=lambda item: -len(item[1]))[:most]:
        names = [f"{row['type']} {row['plan']}" for row in own]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        lines.append(f"| {len(own)} | {cause.replace('|', '/')} | {shown} |")
    return lines


def whole_reasons(rows: list[dict[str, Any]], most: int) -> list[str]:
    """Return why parameters stay whole under tp, in architectures of which less than 90 % are cut."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for row in rows:
        if row["verdict"] == "equal" and row.get("cut_of_blocks", 1.0) < 0.9:
            for reason in row.get("reasons", []):
                match = re.match(r"whole, ([\d.]+)% of the parameters: .*?: (.*)", reason)
                if match and float(match[1]) >= 3:
                    text = re.sub(r"'[^']*'", "'X'", re.sub(r"\d+", "N", match[2]))[:130]
                    found[text].append(f"{row['type']} {row['plan']} {match[1]}%")
    lines = ["| cells | why | where |", "|---|---|---|"]
    for text, own in sorted(found.items(), key=lambda item: -len(item[1]))[:most]:
        lines.append(f"| {len(own)} | {text.replace('|', '/')} | {', '.join(own[:5])} |")
    return lines


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each architecture with the verdict of each plan."""
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    lines = [f"| architecture | kind | {' | '.join(plans)} |", "|" + "---|" * (len(plans) + 2)]
    own: dict[str, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for row in rows:
        own[row["type"]][row["plan"]] = row
    for name, by in own.items():
        shown = [_short(by[plan]) if plan in by else "" for plan in plans]
        lines.append(f"| {name} | {next(iter(by.values()))['kind']} | {' | '.join(shown)} |")
    return lines


def _short(row: dict[str, Any]) -> str:
    if row["verdict"] != "equal":
        return f"**{row['verdict']}**" if row["verdict"] != "refused" else "refused"
    return f"= {row['cut_of_blocks']:.2f}" if "cut_of_blocks" in row else "="


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--cells", action="store_true", help="a line for each architecture")
    parser.add_argument("--causes", type=int, default=25, help="how many causes")
    arguments = parser.parse_args()
    rows = latest(arguments.path)
    parts = [by_plan(rows), causes(rows, arguments.causes), whole_reasons(rows, arguments.causes)]
    if arguments.cells:
        parts.append(cells(rows))
    print("\n\n".join("\n".join(part) for part in parts))


if __name__ == "__main__":
    main()
