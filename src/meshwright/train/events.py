"""Folder of a run: `events.jsonl`, `record.json`, and the lock that keeps a second run out.

Every event is one line of JSON with "event" and "time" (seconds since 1970). Rank 0 makes them:

    run_started  name, plan, num_ranks, device, num_parameters, steps, global_batch_size, ...
    planned      plan: in full, with what it decided when it saw the first batch, and why
    step         step, loss, grad_norm, lr, num_samples, num_tokens, seconds, tokens_per_s, peak_memory_bytes, eta_s, ...
    evaluated    step, loss, num_samples, num_tokens, seconds
    stopped      step: asked to stop; finished: all steps done, or the time is over
    failed       rank, step, phase, type, text: from every rank that raised
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import DirectoryInUseError, StorageError
from meshwright.spec.record import RunRecord

__all__: list[str] = []

EVENTS_FILE = "events.jsonl"
RECORD_FILE = "record.json"
LOCK_FILE = ".lock"


class RunDirectory:
    """A run's folder, locked for as long as it is open.

    Args:
        path: The folder; it is made where it is missing.

    Raises:
        DirectoryInUseError: Another process has it.
        StorageError: It cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        with _storage(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._events = (path / EVENTS_FILE).open("a", encoding="utf-8")

    def write_event(self, event: dict[str, Any]) -> None:
        """Append an event and flush it; numbers that are not finite become null.

        Raises:
            StorageError: The disk is full or gone.
        """
        with _storage(self.path / EVENTS_FILE):
            self._events.write(json.dumps(_plain(event), allow_nan=False) + "\n")
            self._events.flush()

    def write_record(self, record: RunRecord) -> None:
        """Write record.json; a reader sees the old one or the new one, never a part.

        Raises:
            StorageError: The disk is full or gone.
        """
        path = self.path / RECORD_FILE
        with _storage(path):
            partial = path.with_suffix(".json.partial")
            try:
                with partial.open("w", encoding="utf-8") as file:
                    file.write(record.to_json(indent=2) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink()
                raise

    def close(self) -> None:
        """Close the files and let another run have the folder.

        Raises:
            StorageError: The disk is full or gone.
        """
        try:
            with _storage(self.path / EVENTS_FILE):
                self._events.close()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # An error that is on its way is the one to be shown.
        with contextlib.suppress(StorageError) if kind is not None else contextlib.nullcontext():
            self.close()

    def _take_lock(self) -> int:
        # The kernel drops the lock with the process, however that ends; the file itself stays. Not inherited by ranks.
        descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise DirectoryInUseError(
                f"another run, process {holder}, is using {self.path} (rule: one run for each folder)",
                fix="wait for it, or give this run another name: --set train.name=NAME",
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of the last run in a folder, or in an events.jsonl. An unfinished last line is left out.

    Raises:
        StorageError: There is no such file, or a line in its middle is damaged.
    """
    path = path / EVENTS_FILE if path.is_dir() else path
    with _storage(path):
        lines = path.read_text(encoding="utf-8").split("\n")
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = json.loads(line)
        except ValueError:
            raise StorageError(f"{path}, line {number} is damaged: {line[:60]!r}") from None
        if event.get("event") == "run_started":
            events.clear()
        events.append(event)
    return events


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, str | int | bool) else str(value)
