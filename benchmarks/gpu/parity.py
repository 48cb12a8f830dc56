"""Parity tests whose ranks share one GPU and exchange by NCCL: how many pass, by file, and what failed.

MESHWRIGHT_DEVICE=cuda:0 python -m benchmarks.gpu.parity --out benchmarks/gpu/results/parity.json tests/parity/test_sharded.py ...

Ranks that share a GPU take turns on it, so that a test takes seconds; with more than three workers each takes longer still.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.surroundings import environment


def rows_of(report: Path) -> list[dict[str, Any]]:
    """Return a row for each test of a JUnit report."""
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        row = {
            "file": str(case.get("classname")).replace(".", "/") + ".py",
            "test": case.get("name"),
            "outcome": outcome,
        }
        for child in case:
            if child.tag in ("failure", "error"):
                row["message"] = str(child.get("message")).splitlines()[0][:300]
        rows.append(row)
    return rows


def main() -> None:
    """Run the tests and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--choice", default="--each-value", help="of cells: --each-value, or nothing for all")
    parser.add_argument("tests", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        # Benchmark plugins of other projects refuse xdist.
        words = ["-p", "no:benchmark", "-q", "--tb=short", "-n", str(arguments.workers), f"--junitxml={report}"]
        words += [arguments.choice] if arguments.choice else []
        process = subprocess.Popen([sys.executable, "-m", "pytest", *words, *arguments.tests])
        try:
            process.wait(arguments.timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(2)  # pytest writes what it has
            process.wait(60)
        rows = rows_of(report)
    counts = collections.Counter((row["file"], row["outcome"]) for row in rows)
    told = {"device": os.environ.get("MESHWRIGHT_DEVICE", ""), "tests": len(rows)}
    files = {f"{file} {outcome}": count for (file, outcome), count in sorted(counts.items())}
    written = {"environment": environment() | told, "counts": files, "rows": rows}
    arguments.out.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(files, indent=1))


if __name__ == "__main__":
    main()
