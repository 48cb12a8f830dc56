"""Checkpoints of a run, as its ranks take them: when one is due, which stay, and where a run continues."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.durable import rename
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.errors import CheckpointError, MeshwrightError, StorageError
from meshwright.ranks.world import World
from meshwright.run.checkpoints.loading import Loaded, load
from meshwright.run.checkpoints.saving import save_checkpoint
from meshwright.run.parallel_model import ParallelModel
from meshwright.train.config.types import TrainConfig
from meshwright.train.resume import fixed_settings, refuse_changes

__all__: list[str] = []

STATE_VERSION = 1
_SKIPPED = "skipped-"


class RunState:
    """What a run knows beside its model and the place in its data.

    Args:
        config: The configuration.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.settings = fixed_settings(config)
        self.num_steps = config.train.steps
        self.eval_loss: float | None = None
        """Held-out loss of the last evaluation."""
        self.evaluated_at: int | None = None
        """The step after which that was [count]."""
        self.best_loss: float | None = None
        """The lowest held-out loss so far."""
        self.best_step: int | None = None
        """The step after which that was [count]."""

    def note_evaluation(self, step: int, loss: float) -> bool:
        """Note a held-out loss; returns whether it is the lowest of a trained model so far."""
        self.eval_loss, self.evaluated_at = loss, step
        is_best = step > 0 and math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if is_best:
            self.best_loss, self.best_step = loss, step
        return is_best

    def state_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "version": STATE_VERSION,
            "settings": self.settings,
            "num_steps": self.num_steps,
            "eval_loss": _finite(self.eval_loss),
            "evaluated_at": self.evaluated_at,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            CheckpointError: It is of another version.
        """
        _check_version(state, "its state of the run")
        self.eval_loss, self.evaluated_at = state["eval_loss"], state["evaluated_at"]
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]


class RunCheckpoints:
    """The checkpoints of one run. Every rank calls what is here.

    Args:
        config: The configuration.
        model: The model.
        parts: Name -> what has a `state_dict` of JSON values and a `load_state_dict`: the loader, the state of the run.
    """

    def __init__(self, config: TrainConfig, model: ParallelModel, parts: Mapping[str, Any]) -> None:
        self._config = config.checkpoint
        self._directory = config.checkpoint_directory
        self._store = Store(self._directory)
        self._model = model
        self._parts = dict(parts)
        self._saved_at = time.monotonic()
        self.last_step: int | None = None
        """The step of the newest one [count]."""

    @property
    def asks_the_clock(self) -> bool:
        """Whether some are due by time."""
        return self._config.every_minutes > 0

    def is_time(self) -> bool:
        """Whether one is due by this rank's clock."""
        return self.asks_the_clock and time.monotonic() - self._saved_at >= 60 * self._config.every_minutes

    def is_due(self, step: int, *, is_time: bool, is_end: bool, is_best: bool) -> bool:
        """Whether one is due after a step, equal on every rank.

        Args:
            step: Steps that are done [count].
            is_time: What `is_time` said on rank 0.
            is_end: Whether the run ends here.
            is_best: Whether the held-out loss is the lowest so far.
        """
        every = self._config.every_steps
        wanted = is_time or (every > 0 and step % every == 0)
        wanted = wanted or (is_end and self._config.at_end) or (is_best and self._config.best)
        return wanted and step != self.last_step

    def save(self, step: int, *, best_step: int | None) -> dict[str, Any]:
        """Save, let the oldest go, and return an event that tells of it.

        Args:
            step: Steps that are done [count].
            best_step: The step whose checkpoint stays in any case [count].

        Raises:
            CheckpointError: The state has something that cannot be saved, with on_error = "stop".
            StorageError: The disk is full or fails, with on_error = "stop".
        """
        began = time.monotonic()
        try:
            path = save_checkpoint(self._model, self._directory, step=step, extra=self._parts)
        except (CheckpointError, StorageError) as error:
            if self._config.on_error == "stop":
                raise
            self._saved_at = time.monotonic()
            return {"event": "save_failed", "step": step, "text": str(error)}
        self.last_step, self._saved_at = step, time.monotonic()
        event = {"event": "saved", "step": step, "path": str(path), "seconds": self._saved_at - began}
        event["is_best"] = self._config.best and best_step == step
        return event | self._retain(step, best_step)

    def _retain(self, step: int, best_step: int | None) -> dict[str, Any]:
        if self._model.world.rank or not self._config.keep:
            return {}
        stay = {step} | ({best_step} if self._config.best and best_step is not None else set())
        try:
            self._store.retain(self._config.keep, also=stay)
        except StorageError as error:  # there is one more than was asked for, which ends no run
            return {"warning": f"an old checkpoint stays: {error.message}"}
        return {}

    def resume(self) -> Loaded:
        """Continue at the newest sound one.

        Raises:
            CheckpointError: There is none, or it is of another model.
            StorageError: It cannot be read.
        """
        loaded = load(self._model, self._directory, extra=self._parts)
        self.last_step, self._saved_at = loaded.step, time.monotonic()
        if self._model.world.rank == 0:
            for path, _ in loaded.skipped:
                _set_aside(path)
        return loaded


def agree_on_start(config: TrainConfig, world: World, *, resume: bool) -> bool:
    """Return whether the run continues, as rank 0 says, after a look at what it would continue; before the model is built.

    What former processes left unfinished is deleted: rank 0's process holds the run's lock, or its launching process does.

    Args:
        config: The configuration.
        world: This process's place.
        resume: Whether this rank was told to continue.

    Raises:
        ConfigError: The checkpoint is of a run with other settings.
        CheckpointError: There is none that can be read, or it was not saved by a run.
        StorageError: The folder cannot be read.
    """
    told: dict[str, Any] = {"resume": resume}
    if world.rank == 0:
        try:
            store = Store(config.checkpoint_directory)
            with contextlib.suppress(StorageError):  # they are in nobody's way
                store.clear_leftovers()
            if resume:
                told |= _look_into_newest(store)
        except (CheckpointError, StorageError) as error:
            told |= {"kind": type(error).__name__, "message": error.message, "fix": error.fix}
    told = world.default_group.all_gather_json(told, device=world.device)[0]
    if "kind" in told:
        kind: type[MeshwrightError] = CheckpointError if told["kind"] == CheckpointError.__name__ else StorageError
        raise kind(told["message"], fix=told["fix"])
    if told["resume"]:
        refuse_changes(told["settings"], fixed_settings(config), told["path"])
    return told["resume"]


def _look_into_newest(store: Store) -> dict[str, Any]:
    """Return path and settings of the newest checkpoint whose manifest is sound; its files are checked when it is loaded."""
    reasons = []
    for saved in store.saved():
        try:
            with OpenCheckpoint(saved.path) as snapshot:
                state = snapshot.manifest.state
        except (CheckpointError, StorageError) as error:
            reasons.append(f"\n  {saved.path.name}: {error.message}")
            continue
        run = state.get("extra", {}).get("run")
        if not isinstance(run, dict):
            raise CheckpointError(
                f"{saved.path} was not saved by `meshwright train`: it says nothing of a run",
                fix="load it with mw.load_checkpoint, or move it out of the run's folder",
            )
        _check_version(run, f"what {saved.path} says of the run")
        return {"path": str(saved.path), "settings": run["settings"]}
    raise CheckpointError(
        f"no sound checkpoint is in {store.root}{''.join(reasons)}", fix="start anew: leave out --resume"
    )


def _check_version(state: Mapping[str, Any], what: str) -> None:
    if state.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"{what} has version {state.get('version')!r}, this program reads version {STATE_VERSION}"
        )


def _set_aside(path: Path) -> None:
    """Rename a checkpoint that was skipped: it would count as newer than those that this run is about to save."""
    number = 1
    while (aside := path.with_name(f"{_SKIPPED}{path.name}" + (f"-{number}" if number > 1 else ""))).exists():
        number += 1
    rename(path, aside)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
