"""Report of a run at its end. What that needs is loaded at the run's start, beside the ranks' own imports.

At the end of a run that has failed somebody waits for the exit code, and these imports take most of a second on a busy machine.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.texts import clean

__all__: list[str] = []


class RunReport:
    """The report of one run.

    Args:
        in_background: Whether to load in a thread; False loads at once, in a process that may fork meanwhile.
    """

    def __init__(self, *, in_background: bool) -> None:
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(target=_load, name="meshwright-report", daemon=True)
            self._thread.start()
        else:
            _load()

    def close(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def write(self, path: Path) -> bool:
        """Write report.html into the run's folder, and return whether that was done; otherwise it is told.

        Args:
            path: The folder.
        """
        self.close()
        from meshwright.report.page import write_run_report

        try:
            write_run_report(path)
        except MeshwrightError as error:
            sys.stderr.write(f"warning: no report: {clean(error)}\n")
            return False
        return True


def _load() -> None:
    with contextlib.suppress(Exception):  # it comes again when the report is written
        from meshwright.report.page import load_template

        load_template()
