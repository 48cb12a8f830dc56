"""Logger that writes metrics.csv: a row for each step, and one for each evaluation."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

from meshwright.checkpoint.durable import open_own_file

__all__: list[str] = []

CSV_FILE: Final = "metrics.csv"
COLUMNS: Final = (
    *("step", "time", "train/loss", "train/grad_norm", "train/lr", "train/step_s", "train/samples_per_s"),
    *("train/tokens_per_s", "train/peak_memory_bytes", "eval/loss", "eval/seconds"),
)


class MetricsCsv:
    """Writes one file, whose rows are whole also after a kill.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CSV_FILE
        self._file: TextIO | None = None

    def begin(self, step: int) -> None:
        """Keep the rows up to this step; none of them, where the run begins."""
        self.end(has_failed=False)
        kept = [row for row in self._rows() if int(row["step"]) <= step] if step else []
        flags = os.O_WRONLY | os.O_TRUNC
        self._file = os.fdopen(open_own_file(self._path, flags), "w", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        self._writer.writeheader()
        self._writer.writerows(kept)
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Write a row."""
        if self._file is not None:
            self._writer.writerow(
                {"step": step, "time": f"{at:.3f}", **{name: repr(one) for name, one in metrics.items()}}
            )
            self._file.flush()

    def end(self, *, has_failed: bool) -> None:  # noqa: ARG002 - as of every logger
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rows(self) -> list[dict[str, str]]:
        """Return the whole rows that are there."""
        try:
            with self._path.open(encoding="utf-8", newline="") as file:
                text = file.read()
        except FileNotFoundError:
            return []
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [row for row in csv.DictReader(lines) if (row.get("step") or "").isdigit()]
