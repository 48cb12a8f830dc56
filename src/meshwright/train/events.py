"""Folder of a run: `events.jsonl`, `record.json`, and the lock that keeps a second run out.

Every event is one line of JSON with "event" and "time" (seconds since 1970). Rank 0 makes them:

    run_started  name, plan, num_ranks, device, num_parameters, steps, global_batch_size, ...
    planned      plan: in full, with what it decided when it saw the first batch, and why
    held         tensors: FQN -> shape, and ranks -> the part that they hold; num_left_out
    step         step, loss, grad_norm, lr, num_samples, num_tokens, seconds, tokens_per_s, peak_memory_bytes, eta_s, ...
    evaluated    step, loss, num_samples, num_tokens, seconds
    resumed      in place of run_started, with the same fields; and step, checkpoint, skipped, notes
    saved        step, path, seconds until it was seen on the disk, stall_seconds that training waited, is_best;
                 save_failed: step, text, where the run goes on
    traced       step, steps that trace.json holds, path, id of the file, seconds; trace_failed: step, text
    restarting   step, number, most, pause_s, exit_code, cause: ranks were lost and are started again
    stopped      step: asked to stop; finished: all steps done, or the time is over
    failed       rank, step, phase, type, text: from every rank that raised
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from pathlib import Path
from typing import Any, TextIO

from meshwright.checkpoint.durable import open_own_file, rename, told_of, write_new_file
from meshwright.errors import ConfigError, StorageError
from meshwright.spec.plan import Plan
from meshwright.spec.record import RunRecord
from meshwright.train.lock import FolderLock

__all__: list[str] = []

EVENTS_FILE = "events.jsonl"
RECORD_FILE = "record.json"
LOCK_FILE = ".lock"
CHECKPOINTS = "checkpoints"
WARM_UP_STEPS = 3
"""First steps of a process that measurements leave out [count]."""
_PROBE = ".probe-"
_BLOCK_BYTES = 1 << 16


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
        with told_of(path, "open"):
            path.mkdir(parents=True, exist_ok=True)
            _refuse_others_link(self.checkpoints)
            self._lock = FolderLock(path / LOCK_FILE, path)
            try:
                _drop_unfinished_line(path / EVENTS_FILE)
                self._events = self._open_events()
            except BaseException:
                self._lock.close()
                raise

    def _open_events(self) -> TextIO:
        return os.fdopen(open_own_file(self.path / EVENTS_FILE, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def write_event(self, event: dict[str, Any]) -> None:
        """Append an event and flush it; numbers that are not finite become null.

        Raises:
            StorageError: The disk is full or gone.
        """
        with told_of(self.path / EVENTS_FILE, "write"):
            self._events.write(json.dumps(_plain(event), allow_nan=False) + "\n")
            self._events.flush()

    def write_record(self, record: RunRecord) -> None:
        """Write record.json; a reader sees the old one or the new one, never a part.

        Raises:
            StorageError: The disk is full or gone.
        """
        path = self.path / RECORD_FILE
        partial = path.with_suffix(".json.partial")
        with told_of(partial, "remove"):
            partial.unlink(missing_ok=True)  # of a run that was killed
        try:
            write_new_file(partial, [(record.to_json(indent=2) + "\n").encode()])
            with told_of(path, "rename"):
                partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    @property
    def doubt(self) -> str:
        """Why another user may choose what this run reads and writes; empty where none may."""
        status = self.path.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"warning: {self.path} belongs to another user, who can replace what is in it"
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"warning: every user can write into {self.path} and replace what is in it; chmod o-w"
        return ""

    @property
    def has_record(self) -> bool:
        """Whether there is a record, of this run's start or of what it is continued from."""
        return (self.path / RECORD_FILE).is_file()

    def read_plan(self) -> Plan | None:
        """Return the plan that the record names, without what was decided at its first batch; None where there is none."""
        try:
            record = RunRecord.from_json((self.path / RECORD_FILE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError):
            return None
        return record.plan.replace(layouts={}, stages={}, prediction=record.prediction)

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def has_checkpoints(self) -> bool:
        """Whether there are checkpoints, sound or not.

        Raises:
            StorageError: It cannot be read.
        """
        with told_of(self.checkpoints, "read"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return any(name.startswith("step-") for name in os.listdir(self.checkpoints))
        return False

    @property
    def has_steps(self) -> bool:
        """Whether the events tell of a step.

        Raises:
            StorageError: They cannot be read.
        """
        with told_of(self.path / EVENTS_FILE, "read"), (self.path / EVENTS_FILE).open(encoding="utf-8") as lines:
            return any(line.startswith('{"event": "step"') for line in lines)

    def set_checkpoints_aside(self) -> Path | None:
        """Give the folder of a former run's checkpoints another name, and return that; None where there are none.

        A run that starts anew must not be continued from them, nor let its own go because they are of later steps.

        Raises:
            StorageError: It cannot be renamed.
        """
        return self._set_aside(CHECKPOINTS, "") if self.has_checkpoints else None

    def set_events_aside(self) -> Path | None:
        """Give the events of a former run another name, and return that; None where there are none.

        Raises:
            StorageError: They cannot be renamed, or no new file can be opened.
        """
        with told_of(self.path / EVENTS_FILE, "rename"):
            if not (self.path / EVENTS_FILE).stat().st_size:
                return None
            self._events.close()
            aside = self._set_aside(*EVENTS_FILE.split("."))
            self._events = self._open_events()
        return aside

    def _set_aside(self, name: str, suffix: str) -> Path:
        """Rename what a former run has left to the first free name of the kind name.1.suffix, and return that."""
        end = f".{suffix}" if suffix else ""
        number = 1
        while (aside := self.path / f"{name}.{number}{end}").exists():
            number += 1
        rename(self.path / f"{name}{end}", aside)
        return aside

    def try_checkpoints(self) -> None:
        """Write, sync, rename and remove an empty file where checkpoints will be: now, not after hours of training.

        Raises:
            StorageError: One of these fails.
        """
        with told_of(self.checkpoints, "make"):
            self.checkpoints.mkdir(exist_ok=True)
        probe = self.checkpoints / f"{_PROBE}{secrets.token_hex(4)}"
        other = probe.with_suffix(".renamed")
        try:
            write_new_file(probe, [b"probe"], 5)
            rename(probe, other)
        finally:
            for path in (probe, other):
                with contextlib.suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Close the files and let another run have the folder.

        Raises:
            StorageError: The disk is full or gone.
        """
        try:
            with told_of(self.path / EVENTS_FILE, "close"):
                self._events.close()
        finally:
            with told_of(self.path / LOCK_FILE, "close"):
                self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # An error that is on its way is the one to be shown.
        with contextlib.suppress(StorageError) if kind is not None else contextlib.nullcontext():
            self.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of the last run in a folder, or in an events.jsonl. An unfinished last line is left out.

    Where a run was continued, what it had done after that checkpoint is left out, so that each step is there once.

    Raises:
        StorageError: There is no such file, or a line in its middle is damaged.
    """
    path = path / EVENTS_FILE if path.is_dir() else path
    with told_of(path, "read"):
        lines = path.read_text(encoding="utf-8").split("\n")
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = json.loads(line)
        except ValueError:
            raise StorageError(f"{path}, line {number} is damaged: {line[:60]!r}") from None
        if event.get("event") == "run_started":
            events.clear()
        elif event.get("event") == "resumed":
            events = [known for known in events if not _is_undone(known, event["step"])]
        events.append(event)
    return events


def _is_undone(event: dict[str, Any], step: int) -> bool:
    return event.get("event") in ("step", "evaluated", "saved") and event["step"] > step


def _drop_unfinished_line(path: Path) -> None:
    """Cut off what a run that was killed left of its last event: the next one would make it a damaged line in the middle."""
    with open(open_own_file(path, os.O_RDWR), "rb+") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _refuse_others_link(path: Path) -> None:
    """Raise StorageError where another user has put a link here; whoever runs may keep checkpoints on another disk."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.getuid(), 0):
            raise StorageError(f"{path} is a symbolic link of another user", fix=f"look at it, then: rm {path}")
