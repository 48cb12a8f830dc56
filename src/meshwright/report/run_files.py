"""Reading of a run's folder with suspicion: sizes are bounded, links are not followed, damage is told and left out."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from meshwright.errors import ConfigError, StorageError
from meshwright.spec.plan import Plan
from meshwright.spec.record import RunRecord

__all__: list[str] = []

EVENTS_FILE: Final = "events.jsonl"
RECORD_FILE: Final = "record.json"
MOST_EVENT_BYTES: Final = 1 << 30
"""Bytes of events.jsonl that are read at most; of a larger file, the first ones."""
MOST_LINE_BYTES: Final = 16 << 20
"""Longest line of events.jsonl [bytes]."""
MOST_RECORD_BYTES: Final = 64 << 20
"""Largest record.json [bytes]."""
MOST_REMARKABLE: Final = 200
"""Events other than steps and evaluations that are kept, of each kind [count]."""
MOST_KINDS: Final = 100
"""Kinds of such events that are kept [count]."""
MOST_DAMAGED: Final = 5
"""Damaged lines that are quoted [count]."""

STEP_FIELDS: Final = (
    "loss", "grad_norm", "lr", "seconds", "step_seconds", "num_samples", "samples_per_s", "tokens_per_s", "num_tokens",
    "peak_memory_bytes",
)  # fmt: skip
EVALUATION_FIELDS: Final = ("loss", "seconds", "num_samples")


class Series:
    """Numbers by step, as columns; what is missing or not finite is NaN.

    Args:
        names: The columns.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.steps = array("q")
        self.columns = {name: array("d") for name in names}

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: int, event: dict[str, Any]) -> None:
        """Add the numbers of an event."""
        self.steps.append(step)
        for name, column in self.columns.items():
            column.append(number_of(event.get(name)))

    def drop_after(self, step: int) -> None:
        """Remove the steps after this one, which a resumption did again."""
        keep = len(self.steps)
        while keep and self.steps[keep - 1] > step:
            keep -= 1
        del self.steps[keep:]
        for column in self.columns.values():
            del column[keep:]

    def clear(self) -> None:
        """Remove all."""
        self.drop_after(-1)

    def since_when_not_finite(self, name: str) -> int | None:
        """Return the step from which on a column has no finite number; None where its last one is finite."""
        column, found = self.columns[name], None
        for place in range(len(column) - 1, -1, -1):
            if not math.isnan(column[place]):
                break
            found = self.steps[place]
        return found


@dataclasses.dataclass(slots=True)
class RunFiles:
    """A run as its folder tells of it."""

    path: Path
    record: RunRecord | None = None
    plan: Plan | None = None
    """The record's plan; the last `planned` event's where there is no record."""
    start: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """The event of the run's start, or of the last resumption."""
    steps: Series = dataclasses.field(default_factory=lambda: Series(STEP_FIELDS))
    evaluations: Series = dataclasses.field(default_factory=lambda: Series(EVALUATION_FIELDS))
    skipped: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    """Steps that left the parameters as they were."""
    remarkable: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    """Events of other kinds, in their order."""
    problems: list[str] = dataclasses.field(default_factory=list[str])
    """Damage, and what was left out."""

    @property
    def name(self) -> str:
        """The run's own name; its folder's where it did not tell one."""
        told = self.start.get("name")
        return told if isinstance(told, str) and told else self.path.absolute().name

    def last(self, *kinds: str) -> dict[str, Any] | None:
        """Return the last event of some kinds; None where there is none."""
        return next((event for event in reversed(self.remarkable) if event["event"] in kinds), None)


def read_run(path: Path) -> RunFiles:
    """Read a run's folder.

    Args:
        path: The folder.

    Raises:
        ConfigError: It is not a folder, or has neither events.jsonl nor record.json.
        StorageError: A file cannot be read.
    """
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a run's folder", fix="name a folder that `meshwright train` made, as runs/NAME"
        )
    run = RunFiles(path)
    has_record = _read_record(run)
    has_events = _read_events(run)
    if not (has_record or has_events):
        why = "; ".join(run.problems)
        raise ConfigError(
            f"{path} has neither {EVENTS_FILE} nor {RECORD_FILE} that can be read{': ' if why else ''}{why}",
            fix="name a folder that `meshwright train` made, as runs/NAME",
        )
    return run


def read_json_file(path: Path, most_bytes: int = MOST_RECORD_BYTES) -> str | None:
    """Return the text of a regular file; None where it is not there.

    Raises:
        ConfigError: It is a link, not a regular file, too large, or not UTF-8.
        StorageError: It cannot be read.
    """
    descriptor = open_regular(path)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most_bytes:
        raise ConfigError(f"{path.name} is larger than {most_bytes} bytes and was not read")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is not UTF-8: {error.reason} at byte {error.start}") from error


def number_of(value: object) -> float:
    """Return a number as a float; NaN for what is not one, or is not finite.

    >>> number_of(3), number_of("3"), number_of(True)
    (3.0, nan, nan)
    """
    if type(value) is float:  # nearly all of a million
        return value if math.isfinite(value) else math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def open_regular(path: Path) -> int | None:
    """Open a regular file without following a link; None where there is none.

    Raises:
        ConfigError: It is a link, or not a regular file.
        StorageError: It cannot be opened.
    """
    try:
        # Non-blocking: opening a named pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path.name} is a symbolic link, which is not followed") from error
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path.name} is not a regular file")
    return descriptor


def _read_record(run: RunFiles) -> bool:
    try:
        text = read_json_file(run.path / RECORD_FILE)
        if text is None:
            run.problems.append(f"there is no {RECORD_FILE}")
            return False
        run.record = RunRecord.from_json(text)
    except ConfigError as error:
        run.problems.append(f"{RECORD_FILE} was left out: {error.message}")
        return False
    except RecursionError:
        run.problems.append(f"{RECORD_FILE} was left out: it is nested too deeply")
        return False
    run.plan = run.record.plan
    return True


def _read_events(run: RunFiles) -> bool:
    try:
        descriptor = open_regular(run.path / EVENTS_FILE)
    except ConfigError as error:
        run.problems.append(f"{EVENTS_FILE} was left out: {error.message}")
        return False
    if descriptor is None:
        run.problems.append(f"there is no {EVENTS_FILE}")
        return False
    with os.fdopen(descriptor, "rb") as file:
        try:
            reader = EventReader(run)
            for number, line in _lines(file, run.problems):
                reader.take(number, line)
        except OSError as error:
            raise StorageError(f"{run.path / EVENTS_FILE} cannot be read: {error.strerror}") from error
    reader.end()
    return True


def _lines(file: Any, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line), the unfinished last one left out; sizes are bounded."""
    total = number = 0
    while line := cast("bytes", file.readline(MOST_LINE_BYTES)):
        total += len(line)
        number += 1
        if total > MOST_EVENT_BYTES:
            problems.append(
                f"{EVENTS_FILE}: only the first {MOST_EVENT_BYTES} bytes were read, up to line {number - 1}"
            )
            return
        if line.endswith(b"\n"):
            yield number, line
        elif len(line) < MOST_LINE_BYTES:
            problems.append(f"{EVENTS_FILE}: the last line, {number}, is unfinished and was left out")
        else:
            problems.append(f"{EVENTS_FILE}: line {number} is longer than {MOST_LINE_BYTES} bytes and was left out")
            while rest := cast("bytes", file.readline(MOST_LINE_BYTES)):
                total += len(rest)
                if rest.endswith(b"\n") or total > MOST_EVENT_BYTES:
                    break


class EventReader:
    """Takes a run's events into its numbers, one line after the other.

    Args:
        run: Where they go.
    """

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._num_damaged = 0
        self._num_bad_plans = 0
        self._kept: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def take(self, number: int, line: bytes) -> None:
        """Add an event, or note that its line is damaged."""
        try:
            event: object = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not isinstance(cast("dict[str, Any]", event).get("event"), str):
            self._note_damage(number, line)
            return
        fields = cast("dict[str, Any]", event)
        kind = fields["event"]
        step = fields.get("step")
        has_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**62
        if kind in ("step", "evaluated", "resumed") and not has_step:
            self._note_damage(number, line)
        elif kind in ("step", "evaluated"):
            series = self._run.steps if kind == "step" else self._run.evaluations
            if series.steps and cast("int", step) <= series.steps[-1]:
                self._note_damage(number, line, why="its step was told before")
            else:
                series.append(cast("int", step), fields)
                if kind == "step" and fields.get("skipped") is True:
                    self._run.skipped.append(cast("int", step))
        else:
            self._take_other(kind, fields)

    def end(self) -> None:
        """Tell what was left out."""
        problems = self._run.problems
        if self._num_damaged > MOST_DAMAGED:
            problems.append(
                f"{EVENTS_FILE}: {self._num_damaged - MOST_DAMAGED} more lines are damaged and were left out"
            )
        for kind, count in self._left_out.items():
            problems.append(f"{EVENTS_FILE}: {count} more events '{kind}' are not shown")

    def _take_other(self, kind: str, fields: dict[str, Any]) -> None:
        run = self._run
        if kind == "run_started":
            run.steps.clear()
            run.evaluations.clear()
            del run.skipped[:]
            run.remarkable.clear()
            self._kept.clear()
            run.start = fields
        elif kind == "resumed":
            run.steps.drop_after(fields["step"])
            run.evaluations.drop_after(fields["step"])
            run.skipped = array("q", (step for step in run.skipped if step <= fields["step"]))
            run.start = fields
        elif kind == "planned":
            self._take_plan(fields)
            return
        elif kind == "held":
            return  # record.json has it
        if kind not in self._kept and len(self._kept) >= MOST_KINDS:
            kind = "of other kinds"
        if self._kept.get(kind, 0) >= MOST_REMARKABLE or kind == "of other kinds":
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._kept[kind] = self._kept.get(kind, 0) + 1
        run.remarkable.append(fields)

    def _take_plan(self, fields: dict[str, Any]) -> None:
        if self._run.record is not None:
            return
        try:
            self._run.plan = Plan.from_dict(fields.get("plan") or {})
        except (ConfigError, TypeError, AttributeError, RecursionError):
            self._num_bad_plans += 1
            if self._num_bad_plans == 1:
                self._run.problems.append(f"{EVENTS_FILE}: the event 'planned' does not hold a plan")

    def _note_damage(self, number: int, line: bytes, why: str = "damaged") -> None:
        self._num_damaged += 1
        if self._num_damaged <= MOST_DAMAGED:
            quoted = line[:60].decode(errors="backslashreplace").rstrip("\n")
            self._run.problems.append(f"{EVENTS_FILE}, line {number} was left out ({why}): {quoted!r}")
