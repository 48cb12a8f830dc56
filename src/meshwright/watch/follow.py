"""A run's folder as it grows: new events are read, not the whole file; how the run is, and which rank is late."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Final

from meshwright.errors import ConfigError, StorageError
from meshwright.report.page import outcome_of
from meshwright.report.run_files import (
    EVENTS_FILE,
    MOST_EVENT_BYTES,
    MOST_LINE_BYTES,
    EventReader,
    RunFiles,
    open_regular,
    read_json_file,
)
from meshwright.spec.rank_states import STATES_FILE, RankStates
from meshwright.train.lock import Owner

__all__: list[str] = []

LOCK_FILE: Final = ".lock"
SILENT_S: Final = 10.0
"""Ranks' states that are older come from a process that hangs, or from another host that is gone [s]."""
_MOST_STATES_BYTES: Final = 32 << 20
_ENDS: Final = ("finished", "stopped", "run_failed")
_BLOCK_BYTES: Final = 1 << 20
_GONE: Final = "unknown: its folder is gone; what was read before is shown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A run at one moment.

    Args:
        run: Its events.
        states: What its ranks do; None where no file tells.
        is_alive: Whether its launching process runs; None where that cannot be known from here.
        outcome: How it is, in words.
        is_over: Whether nothing more will come.
        silent_s: How old the states are [s].
        stopped: Ranks whose process is stopped, as by SIGSTOP or a debugger.
    """

    run: RunFiles
    states: RankStates | None
    is_alive: bool | None
    outcome: str
    is_over: bool
    silent_s: float
    stopped: frozenset[int] = frozenset()
    is_quiet: bool = False
    """Whether the run should tell more than it does."""

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks that others wait for, now or when the run died."""
        if self.states is None or self.run.last("finished", "stopped") is not None:
            return ()
        if self.stopped and self.states.is_late:  # in the middle of an exchange, where they seem to wait
            return tuple(sorted(self.stopped))
        return self.states.late_ranks()


class RunFollower:
    """Reads a run's folder again and again.

    Args:
        folder: The folder.

    Raises:
        ConfigError: It is not a folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a run's folder", fix="name a folder that `meshwright train` made, as runs/NAME"
            )
        self._folder = folder
        self._is_held = False
        self._begin()

    def _begin(self) -> None:
        self._run = RunFiles(self._folder)
        self._reader = EventReader(self._run)
        self._offset = 0
        self._file: tuple[int, int] | None = None
        self._rest = b""
        self._number = 0

    @property
    def num_bytes(self) -> int:
        """How much of the events has been read [bytes]."""
        return self._offset

    def look(self) -> WatchedRun:
        """Read what has come since the last look.

        Raises:
            ConfigError: A file of the folder is a link, or not a file.
            StorageError: The disk fails.
        """
        is_gone = not self._folder.is_dir()
        self._read_events()
        states = self._read_states()
        is_alive = self._is_alive()
        told = outcome_of(self._run)
        is_over = self._run.last(*_ENDS) is not None
        silent_s = 0.0 if states is None else max(0.0, time.time() - states.written_at)
        is_quiet = told is None and is_alive is not False and silent_s > SILENT_S and not self._is_between_starts
        outcome = told or (_GONE if is_gone else self._unended(is_alive, silent_s, is_quiet=is_quiet))
        return WatchedRun(
            run=self._run,
            states=states,
            is_alive=is_alive,
            outcome=outcome,
            is_over=is_over or is_gone or is_alive is False,
            silent_s=silent_s,
            stopped=_stopped(states) if is_alive and states is not None else frozenset(),
            is_quiet=is_quiet,
        )

    @property
    def _is_between_starts(self) -> bool:
        """Whether the ranks were lost, and the next ones have not begun."""
        last = self._run.last("restarting", "run_started", "resumed")
        return last is not None and last["event"] == "restarting"

    def _unended(self, is_alive: bool | None, silent_s: float, *, is_quiet: bool) -> str:
        if is_alive is False:
            step = self._run.steps.steps[-1] if len(self._run.steps) else 0
            how = (
                "killed: its launching process is gone and told no end"
                if self._is_held
                else "ended without telling how"
            )
            return f"{how}; the last step that it told is {step}"
        if not self._run.start:
            return "starting"
        if is_quiet and is_alive is None:
            return f"running or gone: on another host, and its ranks' states are {silent_s:.0f} s old"
        if is_quiet:
            return f"running or standing still: its first process lives, and its ranks' states are {silent_s:.0f} s old"
        return "running"

    def _is_alive(self) -> bool | None:
        """Tell whether the process that holds the folder runs; None where it is of another host, or nobody is named."""
        with contextlib.suppress(ConfigError):
            text = read_json_file(self._folder / LOCK_FILE, 4096)
            owner = Owner.read(text or "")
            self._is_held = owner is not None
            if owner is not None:
                here = Owner.this_process()
                return owner.is_alive_beside_us or owner.pid == here.pid if owner.boot == here.boot else None
            return False if self._run.start else None  # let go of: it has ended, or has not begun
        return None

    def _read_states(self) -> RankStates | None:
        try:
            text = read_json_file(self._folder / STATES_FILE, _MOST_STATES_BYTES)
            return None if text is None else RankStates.from_json(text)
        except ConfigError:
            return None

    def _read_events(self) -> None:
        descriptor = open_regular(self._folder / EVENTS_FILE)
        if descriptor is None:
            return
        try:
            status = os.fstat(descriptor)
            file = (status.st_dev, status.st_ino)
            if self._file not in (None, file) or status.st_size < self._offset:
                self._begin()  # a run that began anew
            self._file = file
            os.lseek(descriptor, self._offset, os.SEEK_SET)
            while self._offset < MOST_EVENT_BYTES and (block := os.read(descriptor, _BLOCK_BYTES)):
                self._offset += len(block)
                self._take(block)
        except OSError as error:
            raise StorageError(f"{self._folder / EVENTS_FILE} cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _take(self, block: bytes) -> None:
        *lines, rest = (self._rest + block).split(b"\n")
        # A line without an end is not kept: its beginning tells that it is too long.
        self._rest = rest if len(rest) <= MOST_LINE_BYTES else rest[:64]
        for line in lines:
            self._number += 1
            self._reader.take(self._number, line + b"\n")


def _stopped(states: RankStates) -> frozenset[int]:
    """Return the ranks whose process is stopped, as the kernel tells it."""
    found: set[int] = set()
    for rank, one in enumerate(states.ranks):
        if one.host:
            continue  # another host's process
        with contextlib.suppress(OSError, IndexError, ValueError):
            letter = Path(f"/proc/{one.pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0]
            if letter in (b"T", b"t"):
                found.add(rank)
    return frozenset(found)
