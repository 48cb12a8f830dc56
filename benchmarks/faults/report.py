"""A campaign's result file: written after each row, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from surroundings import environment


def run_rows(
    cases: Iterable[tuple[str, Callable[[], dict[str, Any]]]], out: Path | None, totals: Iterable[str]
) -> dict[str, Any]:
    """Run those cases that the file does not have yet.

    Args:
        cases: (name, function that gives the row).
        out: The file; None writes none.
        totals: Fields of rows that are added up; lists count.
    """
    report: dict[str, Any] = {"environment": environment(), "seconds": 0.0, "totals": {}, "rows": {}}
    if out is not None and out.exists():
        report = json.loads(out.read_text(encoding="utf-8"))
    for name, run in cases:
        if name in report["rows"]:
            continue
        began = time.monotonic()
        report["rows"][name] = run()
        report["seconds"] = round(report.get("seconds", 0.0) + time.monotonic() - began, 1)
        for total in totals:
            values = [row[total] for row in report["rows"].values() if total in row]
            report["totals"][total] = sum(len(value) if isinstance(value, list) else value for value in values)
        print(name, json.dumps(report["rows"][name])[:600], flush=True)
        if out is not None:
            draft = out.with_suffix(".draft")
            draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            draft.replace(out)
    print(report.get("seconds"), "s", report["totals"])
    return report
