"""Write the table of classes: what each showed on the commit where it was found, and what it shows now.

python -m benchmarks.fuzz.table benchmarks/fuzz/results/classes_base_2026-11-22.json results/classes_now.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def short(row: dict[str, Any] | None) -> str:
    """Return a verdict in a few words."""
    if row is None:
        return "-"
    detail = row["detail"].split("\n")[0].split("; ")[0]
    if row["verdict"] == "equal":
        return "equal"
    if row["verdict"] == "wrong":
        return f"**wrong**: {detail.replace('|', '/')[:70]}"
    name = detail.split(":")[0]
    return f"**{row['verdict']}**: {name}" if row["verdict"] in ("hung", "crashed") else f"{row['verdict']}: {name}"


def main() -> None:
    before, now = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    print("| class and what shows it | plan | when it was found | now |\n|---|---|---|---|")
    for name, row in before.items():
        print(f"| {name} | `{row['plan']}` | {short(row)} | {short(now.get(name))} |")


if __name__ == "__main__":
    main()
