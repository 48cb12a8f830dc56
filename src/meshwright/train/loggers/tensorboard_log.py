"""Logger of TensorBoard: event files in the run's folder `tensorboard`, by the package `tensorboard`, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__: list[str] = []

FOLDER: Final = "tensorboard"


class TensorBoardLog:
    """Writes event files.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._session: Any = event_pb2.SessionLog
        self._writer: Any = EventFileWriter(str(folder / FOLDER), flush_secs=5)

    def begin(self, step: int) -> None:
        """Have later steps, of before a resumption, left out by readers."""
        if step:
            start = self._session(status=self._session.START)
            self._writer.add_event(self._event(step=step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Write the numbers of a step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=at, step=step, summary=self._summary(value=values)))

    def end(self, *, has_failed: bool) -> None:  # noqa: ARG002 - as of every logger
        """Write what is left, and close the file."""
        self._writer.close()
