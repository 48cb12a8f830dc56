"""Saves that are written while training goes on: a copy of the rank's share, and a thread that writes it.

Ranks exchange nothing meanwhile, since their exchanges belong to the steps: each leaves a note beside its file, and the first
rank commits when all notes are there. An error is raised by the next call that all ranks make.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.apply.engine import Engine
from meshwright.checkpoint.store import SaveUnderWay
from meshwright.errors import CheckpointError, InternalError, MeshwrightError, StorageError
from meshwright.run.checkpoints.together import together

__all__: list[str] = []

_LOOK_EVERY_S = 0.02
_AT_EXIT_S = 60.0
"""How long a program that ends waits for its save [s]."""
_STAGES: weakref.WeakKeyDictionary[Any, dict[str, Tensor]] = weakref.WeakKeyDictionary()


def staged(module: nn.Module, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return copies in the host's memory, which is kept for the next save: fresh memory takes longer than the copy.

    Args:
        module: The module that they are of.
        tensors: (name, tensor) of this rank's share.
    """
    known = _STAGES.get(module, {})
    stage: dict[str, Tensor] = {}
    for name, tensor in tensors:
        place = known.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        stage[name] = place.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    if any(tensor.is_cuda for _, tensor in tensors):
        torch.cuda.synchronize()
    _STAGES[module] = stage
    return list(stage.items())


class BackgroundSave:
    """A save under way on one rank.

    Args:
        draft: The save.
        write: Writes this rank's file, and returns its row.
        commit: Commits, given all rows; called on the first rank.
        place: This rank and the number of ranks.
        has_given_up: Tells whether the ranks have stopped working together, so that no further note will come.
    """

    def __init__(
        self,
        draft: SaveUnderWay,
        *,
        write: Callable[[], Any],
        commit: Callable[[list[Any]], str],
        place: tuple[int, int],
        has_given_up: Callable[[], bool],
    ) -> None:
        self._draft, self._write, self._commit = draft, write, commit
        self._rank, self._num_ranks = place
        self._has_given_up = has_given_up
        self.error: MeshwrightError | None = None
        self._is_raised = False
        # A daemon: a program that is to end at once does not wait for the disk. One that ends as it should does.
        self._thread = threading.Thread(target=self._run, name="meshwright-save", daemon=True)
        self._thread.start()
        atexit.register(self.wait, _AT_EXIT_S)

    def _run(self) -> None:
        try:
            self._draft.leave_note(self._rank, [None, self._write()])
            if self._rank == 0:
                self._commit(self._rows())
        except (StorageError, CheckpointError) as error:
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
            self._fail(InternalError(f"a save in the background has failed: {type(error).__name__}: {error}"))

    def _rows(self) -> list[Any]:
        rows: list[Any] = []
        while len(rows) < self._num_ranks:
            note = self._draft.read_note(len(rows))
            if note is None:
                if self._has_given_up():
                    raise StorageError(
                        f"the save of step {self._draft.step} was given up: other ranks are gone", is_told=True
                    )
                time.sleep(_LOOK_EVERY_S)
                continue
            failure, row = note
            if failure is not None:
                raise StorageError(failure, is_told=True, rank=len(rows))
            rows.append(row)
        for rank in range(self._num_ranks):
            self._draft.remove_note(rank)
        return rows

    def _fail(self, error: MeshwrightError) -> None:
        self.error = error
        if self._rank == 0:
            self._draft.discard()
            return
        with contextlib.suppress(StorageError):  # the next step tells the first rank as well
            self._draft.leave_note(self._rank, [error.message, None])

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when this rank has done its part, or after some time."""
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            atexit.unregister(self.wait)

    def raise_error(self) -> None:
        """Raise what went wrong, once."""
        if self.error is not None and not self._is_raised:
            self._is_raised = True
            raise self.error


def raise_error(saving: BackgroundSave | None) -> None:
    """Raise what has gone wrong in a save, if there is one."""
    if saving is not None:
        saving.raise_error()


def wait_for(saving: BackgroundSave | None) -> None:
    """Return when a save, if there is one, is over on this rank."""
    if saving is not None:
        saving.wait()


class HasSaves(Protocol):
    """A model that may have a save under way."""

    engine: Engine
    saving: BackgroundSave | None


def finish(model: HasSaves) -> None:
    """Wait for a save under way; every rank calls it.

    Raises:
        StorageError: It has failed, on any rank.
    """
    saving, model.saving = model.saving, None

    def wait() -> None:
        if saving is not None:
            saving.wait()
            saving.raise_error()

    if any(model.engine.everyone.all_gather_json(saving is not None, device=model.engine.device)):
        together(model.engine.everyone, model.engine.device, wait, lambda _: None)
