"""Checkpoints of a run, as its ranks take them: when one is due, which stay, and where a run continues."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint.durable import rename
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.errors import CheckpointError, InternalError, MeshwrightError, StorageError
from meshwright.ranks.world import World
from meshwright.run.checkpoints.loading import Loaded, load
from meshwright.run.checkpoints.saving import Retention, is_saved, save, wait_for_checkpoint
from meshwright.run.parallel_model import ParallelModel
from meshwright.train.config.types import TrainConfig
from meshwright.train.resume import as_it_began, fixed_settings, refuse_changes

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


class _BegunSave(NamedTuple):
    """A save that has begun."""

    step: int
    is_best: bool
    began_at: float
    path: str = ""
    stall_s: float = 0.0
    """For how long training has waited until the save had begun [s]."""
    waited_s: Callable[[], float] = lambda: 0.0
    """For how long it has waited since [s]."""


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
        self._model = model
        self._parts = dict(parts)
        self._saved_at = time.monotonic()
        self.last_step: int | None = None
        """The step of the newest one, or of the one that is under way [count]."""
        self._under_way: _BegunSave | None = None
        self._best_kept: int | None = None
        self._warnings: list[str] = []

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

    def save(self, step: int, *, best_step: int | None, is_end: bool) -> Iterator[dict[str, Any]]:
        """Save, let the oldest go, and yield events that tell of it, and before that of the one before.

        In the background this returns when the ranks' shares are copied; `look` and `finish` tell of the rest. Where the run ends
        there is nothing beside which it could be written.

        Args:
            step: Steps that are done [count].
            best_step: The step whose checkpoint stays in any case [count].
            is_end: Whether the run ends here.

        Raises:
            CheckpointError: The state has something that cannot be saved, with on_error = "stop".
            StorageError: The disk is full or fails, with on_error = "stop".
        """
        yield from self.finish()
        self._warnings.clear()
        is_best = self._config.best and best_step == step
        under_way = _BegunSave(step, is_best, time.monotonic())
        in_background = self._config.background and not is_end
        also = () if is_best or self._best_kept is None else (self._best_kept,)
        retention = Retention(self._config.keep or None, also, self._warnings.append, steps_look=False)
        try:
            path = save(self._model, self._directory, step, self._parts, retention, in_background=in_background)
        except (CheckpointError, StorageError) as error:
            yield self._failed(step, error)
            return
        finally:
            self._saved_at = time.monotonic()
        self.last_step = step
        stall_s, saving = self._saved_at - under_way.began_at, self._model.saving
        self._under_way = under_way._replace(path=str(path), stall_s=stall_s)
        if saving is not None:
            self._under_way = self._under_way._replace(waited_s=lambda: saving.waited_s)
        if not in_background:
            yield self._ended()

    def look(self) -> Iterator[dict[str, Any]]:
        """Yield an event of a save in the background that is over, without waiting; raises as `save` does."""
        yield from self._end(is_saved)

    def finish(self) -> Iterator[dict[str, Any]]:
        """Wait for a save in the background, and yield its event; raises as `save` does."""
        yield from self._end(_wait)

    def _end(self, is_over: Callable[[ParallelModel], bool]) -> Iterator[dict[str, Any]]:
        if self._under_way is None:
            return
        try:
            if not is_over(self._model):
                return
        except (CheckpointError, StorageError) as error:
            step, self._under_way, self.last_step = self._under_way.step, None, None
            yield self._failed(step, error)
            return
        yield self._ended()

    def _failed(self, step: int, error: MeshwrightError) -> dict[str, Any]:
        if self._config.on_error == "stop":
            raise error
        return {"event": "save_failed", "step": step, "text": str(error)}

    def _ended(self) -> dict[str, Any]:
        done, self._under_way = self._under_way, None
        if done is None:
            raise InternalError("no save is under way")
        if done.is_best:
            self._best_kept = done.step
        event: dict[str, Any] = {"event": "saved", "step": done.step, "path": done.path}
        event |= {"seconds": time.monotonic() - done.began_at, "stall_seconds": done.stall_s + done.waited_s()}
        event |= {"is_best": done.is_best}
        return event | ({"warning": "; ".join(self._warnings)} if self._warnings else {})

    def resume(self) -> Loaded:
        """Continue at the newest sound one.

        Raises:
            CheckpointError: There is none, or it is of another model.
            StorageError: It cannot be read.
        """
        loaded = load(self._model, self._directory, extra=self._parts)
        self._best_kept = self._parts["run"].best_step if self._config.best else None
        self.last_step, self._saved_at = loaded.step, time.monotonic()
        if self._model.world.rank == 0:
            for path, _ in loaded.skipped:
                _set_aside(path)
        return loaded


def _wait(model: ParallelModel) -> bool:
    wait_for_checkpoint(model)
    return True


def agree_on_start(config: TrainConfig, world: World, *, resume: bool) -> tuple[bool, TrainConfig]:
    """Return whether the run continues, as rank 0 says, and its configuration; before the model is built.

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
        config = as_it_began(config, told["settings"])
        refuse_changes(told["settings"], fixed_settings(config), told["path"])
    return told["resume"], config


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
