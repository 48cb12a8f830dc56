"""Hold the numbers that Chromium showed (check.mjs) against record.json and events.jsonl: `same_numbers.py BROWSER.json RUNS`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from meshwright.units import format_bytes, format_seconds


def main(browser: Path, runs: Path) -> int:
    wrong: list[str] = []
    compared = 0
    for seen in json.loads(browser.read_text()):
        folder = runs / Path(seen["report"]).parent
        if not (folder / "record.json").is_file() or Path(seen["report"]).name != "report.html":
            continue
        measured = json.loads((folder / "record.json").read_text())["measurement"]
        if measured is None:
            continue
        expected = {
            "median step": format_seconds(statistics.median(measured["step_seconds"])),
            "peak memory, fullest rank": format_bytes(measured["peak_memory_bytes"]),
            "last loss": f"{measured['loss']:.6g}",
            "tokens/s": f"{measured['num_tokens'] / sum(measured['step_seconds']):,.1f}",
        }
        for name, text in expected.items():
            compared += 1
            if seen["facts"].get(name) != text:
                wrong.append(
                    f"{seen['report']} {seen['scheme']} {seen['width']}: {name} {seen['facts'].get(name)} != {text}"
                )
    print("\n".join(wrong) or f"{compared} numbers are equal")
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
