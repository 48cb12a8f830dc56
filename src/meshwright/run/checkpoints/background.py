"""Saves that are written while training goes on, each by a thread on every rank; what it reads, `live_share` says.

The threads exchange nothing, since exchanges belong to the steps: each leaves a note beside its file, and the first rank commits
when all notes are there. Between two steps the ranks look whether it is over (`look`); an error is raised there, on all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.apply.engine import Engine
from meshwright.checkpoint.store import SaveUnderWay
from meshwright.errors import CheckpointError, InternalError, MeshwrightError, StorageError
from meshwright.ranks import unfinished
from meshwright.run.checkpoints.live_share import LiveShare
from meshwright.run.checkpoints.together import together

__all__: list[str] = []

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.02
_AT_EXIT_S = 60.0
"""How long a program that ends waits for its save, and a model that is closed for another rank's note [s]."""


class BackgroundSave:
    """A save under way on one rank.

    Args:
        draft: The save.
        share: What this rank writes; None where it could not be copied, which `write` tells.
        write: Writes this rank's file, and returns its row.
        commit: Commits, given all rows; called on the first rank.
        place: This rank and the number of ranks.
        has_given_up: Tells whether the ranks have stopped working together, so that no further note will come.
        steps_look: Whether `step` is to look after it; else the one that saves does so itself.
    """

    def __init__(
        self,
        draft: SaveUnderWay,
        *,
        share: LiveShare | None,
        write: Callable[[], Any],
        commit: Callable[[list[Any]], object],
        place: tuple[int, int],
        has_given_up: Callable[[], bool],
        steps_look: bool = True,
    ) -> None:
        self._draft, self._write, self._commit = draft, write, commit
        self._share = share
        self._rank, self._num_ranks = place
        self._has_given_up = has_given_up
        self.steps_look = steps_look
        self._write_error: MeshwrightError | None = None
        self._commit_error: MeshwrightError | None = None
        self._is_written, self._is_called_off = threading.Event(), threading.Event()
        self._closed_at: float | None = None
        # A daemon: a program that is to end at once does not wait for the disk. One that ends as it should does.
        self._thread = threading.Thread(target=self._run, name="meshwright-save", daemon=True)
        self._thread.start()
        unfinished.begin(_OnDisk(self._thread, draft))
        atexit.register(self._leave)

    def _run(self) -> None:
        try:
            row = self._write()
            self._draft.leave_note(self._rank, [None, row])
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
            self._write_error = _as_ours(error)
            with contextlib.suppress(StorageError):  # the next look tells the first rank as well
                self._draft.leave_note(self._rank, [self._write_error.message, None])
        finally:
            if self._share is not None:
                self._share.end()
            self._is_written.set()
        if self._rank:
            return
        try:
            self._commit(self._rows())
            return
        except BaseException as error:  # noqa: BLE001 - likewise
            self._commit_error = _as_ours(error)
        self._draft.discard()

    def _rows(self) -> list[Any]:
        """Return all rows, once every rank has done its part: none is writing any more when the directory goes away."""
        notes = [self._note_of(rank) for rank in range(self._num_ranks)]
        for rank, (failure, _) in enumerate(notes):
            if failure is not None:
                raise StorageError(failure, is_told=True, rank=rank)
        for rank in range(self._num_ranks):
            self._draft.remove_note(rank)
        return [row for _, row in notes]

    def _note_of(self, rank: int) -> list[Any]:
        if rank == self._rank and self._write_error is not None:
            return [self._write_error.message, None]
        since = time.monotonic()
        while (note := self._draft.read_note(rank)) is None:
            self._refuse_to_wait(rank, since)
            time.sleep(_LOOK_EVERY_S)
        return note

    def _refuse_to_wait(self, rank: int, since: float) -> None:
        """Raise an error where the note of a rank will not come."""
        closed_at = self._closed_at
        is_late = closed_at is not None and time.monotonic() - max(since, closed_at) > _AT_EXIT_S
        if self._is_called_off.is_set() or self._has_given_up() or is_late:
            why = f"rank {rank} has not written its file in {_AT_EXIT_S} s" if is_late else "other ranks are gone"
            raise StorageError(f"the save of step {self._draft.step} was given up: {why}", is_told=True)

    def let_go(self) -> None:
        """Read training's memory no more; called before anything of ours changes it, on any rank alone."""
        if self._share is not None:
            self._share.let_go()

    @property
    def step(self) -> int:
        """The step that is saved [count]."""
        return self._draft.step

    def goes_to(self, directory: Path) -> bool:
        """Whether it becomes a checkpoint in this directory, or this checkpoint."""
        wanted = os.path.realpath(directory)
        return wanted in (os.path.realpath(path) for path in (self._draft.path.parent, self._draft.final_path))

    @property
    def waited_s(self) -> float:
        """For how long training has waited in `let_go` [s]."""
        return 0.0 if self._share is None else self._share.waited_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when this rank has done its part, or after some time."""
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Wait where the program ends, and say what went wrong: nobody will look any more."""
        self.wait(_AT_EXIT_S)
        if self._thread.is_alive():
            _LOG.warning(
                "step %d was not saved within the %g s for which a program that ends waits", self.step, _AT_EXIT_S
            )
        else:
            self._tell()

    @property
    def is_over(self) -> bool:
        """Whether this rank has done its part; the first one's is to commit."""
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of an error."""
        return self._write_error is not None or self._commit_error is not None

    def wait_for_file(self) -> None:
        """Return when this rank's file is on the disk.

        Raises:
            StorageError: It cannot be written.
        """
        self._is_written.wait()
        if self._write_error is not None:
            raise self._write_error

    def wait_for_end(self) -> None:
        """Return when this rank has done its part.

        Raises:
            StorageError: It has failed.
        """
        self.wait()
        if self._commit_error is not None:
            raise self._commit_error

    def call_off(self) -> None:
        """Have the first rank remove what is there instead of waiting for a rank that has failed."""
        self._is_called_off.set()
        self.wait()

    def close(self) -> None:
        """Wait for it without the other ranks, and say what went wrong where nobody will look any more."""
        self._closed_at = time.monotonic()
        self.wait()
        self._tell()

    def _tell(self) -> None:
        error = self._write_error or self._commit_error
        if error is not None:
            _LOG.warning("step %d was not saved: %s", self._draft.step, error.message)


class _OnDisk:
    """What is lost where the ranks end too early: the save, until its directory has its name, or is removed."""

    def __init__(self, thread: threading.Thread, draft: SaveUnderWay) -> None:
        self._thread, self._draft = thread, draft

    @property
    def text(self) -> str:
        return f"the save of step {self._draft.step} in {self._draft.path.parent}"

    def is_over(self) -> bool:
        return not self._thread.is_alive() and not self._draft.path.exists()


def _as_ours(error: BaseException) -> MeshwrightError:
    if isinstance(error, (StorageError, CheckpointError)):
        return error
    return InternalError(f"a save in the background has failed: {type(error).__name__}: {error}")


class HasSaves(Protocol):
    """A model that may have a save under way."""

    engine: Engine
    saving: BackgroundSave | None


def let_go(model: HasSaves | None) -> None:
    """Have a save under way read the model's memory no more, since it is about to be changed."""
    if model is not None and model.saving is not None:
        model.saving.let_go()


def look(model: HasSaves) -> bool:
    """Return whether no save is under way any more; every rank calls it, and all are told alike.

    Raises:
        StorageError: It has failed, on any rank.
    """
    saving = model.saving
    if saving is None:
        return True
    flags = torch.tensor([saving.has_failed, not saving.is_over], dtype=torch.int32, device=model.engine.device)
    model.engine.everyone.all_reduce(flags, "max")
    has_failed, is_under_way = flags.tolist()
    if is_under_way and not has_failed:
        return False
    model.saving = None
    _end(model, saving)
    return True


def look_for_step(model: HasSaves) -> None:
    """Look whether a save is over, where steps are to do that.

    Raises:
        StorageError: It has failed, on any rank.
    """
    if model.saving is not None and model.saving.steps_look:
        look(model)


def finish(model: HasSaves) -> None:
    """Wait for a save under way; every rank calls it.

    Raises:
        StorageError: It has failed, on any rank.
    """
    saving, model.saving = model.saving, None
    if saving is not None:
        _end(model, saving)


def _end(model: HasSaves, saving: BackgroundSave) -> None:
    try:
        together(model.engine.everyone, model.engine.device, saving.wait_for_file, lambda _: None)
    except BaseException:
        # A rank whose disk has failed may have left no note, and the first one's thread would wait for it.
        saving.call_off()
        raise
    together(model.engine.everyone, model.engine.device, saving.wait_for_end, lambda _: None)


def close(saving: BackgroundSave | None) -> None:
    """End a save, if there is one, on this rank alone."""
    if saving is not None:
        saving.close()
