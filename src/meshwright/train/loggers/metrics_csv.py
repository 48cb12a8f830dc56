"""Logger that writes metrics.csv: a row for each step, and one for each evaluation."""

from __future__ import annotations

import csv
import io
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from meshwright.checkpoint.durable import open_own_file, write_new_file

__all__: list[str] = []

CSV_FILE: Final = "metrics.csv"
COLUMNS: Final = (
    *("step", "time", "train/loss", "train/grad_norm", "train/lr", "train/step_s", "train/samples_per_s"),
    *("train/tokens_per_s", "train/peak_memory_bytes", "eval/loss", "eval/seconds"),
)

_FORM: Final[dict[str, Any]] = {"fieldnames": COLUMNS, "restval": "", "extrasaction": "ignore", "lineterminator": "\n"}


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
        draft = io.StringIO()
        writer = csv.DictWriter(draft, **_FORM)
        writer.writeheader()
        writer.writerows(kept)
        # In one piece: a run that is killed here keeps the rows that it had.
        partial = self._path.with_name(f".{CSV_FILE}.{secrets.token_hex(4)}.partial")
        os.close(open_own_file(self._path, os.O_RDWR))  # refuses a link, and a file of another user
        write_new_file(partial, [draft.getvalue().encode()])
        partial.replace(self._path)
        flags = os.O_WRONLY | os.O_APPEND
        self._file = os.fdopen(open_own_file(self._path, flags), "a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, **_FORM)

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
        with os.fdopen(open_own_file(self._path, os.O_RDWR), encoding="utf-8", newline="", errors="replace") as file:
            text = file.read()
        lines = text[: text.rfind("\n") + 1].splitlines()
        rows = csv.DictReader(lines)
        return [row for row in rows if (row.get("step") or "").isdecimal() and row["step"].isascii()]
