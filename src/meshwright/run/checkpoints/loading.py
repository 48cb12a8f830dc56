"""load_checkpoint: the newest sound checkpoint of a directory, under whatever plan, checked before anything is touched."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.apply.engine import Engine
from meshwright.apply.held_state import HeldPart
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Saved, Store
from meshwright.checkpoint.tensor_files import dtype_name, memory_of
from meshwright.errors import CheckpointError, ConfigError, StorageError, tensors_differ
from meshwright.run.checkpoints.background import finish, let_go
from meshwright.run.checkpoints.extra_states import load_states, refuse_missing
from meshwright.run.checkpoints.optimizer_rows import OptimizerReader, OptimizerRows, find_groups, merge_groups
from meshwright.run.checkpoints.random_streams import begin_streams, set_own_streams, set_streams, source_of
from meshwright.run.checkpoints.stored_parts import COMPRESSION, MODEL, RANDOM, place_of, stored_name
from meshwright.run.checkpoints.together import require_between_steps, together
from meshwright.run.options import check_directory, check_step_to_load
from meshwright.run.parallel_model import ParallelModel
from meshwright.trees import distinct_entries

__all__: list[str] = []

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What was loaded."""

    step: int
    """Steps of the optimizer that had been taken [count]."""
    path: Path
    """The checkpoint's own directory."""
    skipped: list[tuple[Path, str]]
    """Newer checkpoints that were damaged, and how."""
    notes: list[str]
    """What could not be continued exactly."""


def load_checkpoint(
    model: ParallelModel,
    directory: str | Path,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    with_optimizer: bool = True,
    partial: bool = False,
) -> int:
    """Load the newest sound checkpoint of a directory, saved under any plan; every rank calls it.

    All digests are compared before any tensor is touched. Each rank reads the parts that it holds. A save of this model in the
    background counts: it is waited for where it may be what is loaded. Where the plan cuts the
    model at its first batch (tp, pp), the optimizer's state is loaded then; the files may be deleted meanwhile.

    Args:
        model: What `apply_plan` returned.
        directory: Where `save_checkpoint` put checkpoints, or one checkpoint's own directory.
        step: Load this step; None loads the newest that is whole, and warns of newer ones that are not.
        extra: Name -> object with `load_state_dict()`, for states that `save_checkpoint` got under these names.
        with_optimizer: Whether the optimizer's state is loaded; without it, what the optimizer has stays, which is nothing in a
            new program.
        partial: Load the tensors that model and checkpoint have in common, by name, type and shape. The others stay as they are,
            and a warning lists them. It goes with `with_optimizer=False`.

    Returns:
        The step: how many steps of the optimizer had been taken [count].

    Raises:
        CheckpointError: There is no sound checkpoint, or its tensors are others than the model's; with a list.
        ConfigError: An argument is of another kind, or `partial` comes without `with_optimizer=False`.
        StorageError: A file cannot be read, or the save that was waited for has failed.
    """
    place = check_directory("load_checkpoint", directory)
    check_step_to_load(step)
    loaded = load(model, place, step=step, extra=extra, with_optimizer=with_optimizer, partial=partial)
    if model.world.rank == 0:
        for path, reason in loaded.skipped:
            _LOG.warning("%s was skipped: %s", path, reason)
        for note in loaded.notes:
            _LOG.warning("%s", note)
    return loaded.step


def load(
    model: ParallelModel,
    directory: str | Path,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    with_optimizer: bool = True,
    partial: bool = False,
) -> Loaded:
    """Load a checkpoint as `load_checkpoint` does, and return what there is to say of it."""
    if partial and with_optimizer:
        raise ConfigError(
            "partial=True loads no optimizer's state, which belongs to the whole model",
            fix="pass with_optimizer=False as well",
        )
    engine = model.engine
    require_between_steps(engine.switch, "load_checkpoint")
    let_go(model)
    with model.told("load"), engine.switch.plain():
        group, device = engine.everyone, engine.device
        shared = functools.partial(together, group, device)
        if _is_awaited(shared, model, Path(directory), step):
            finish(model)
        snapshot, skipped = _open_sound(shared, group.group_rank, group.size, Path(directory), step)
        try:
            shared(lambda: refuse_missing(extra or {}, snapshot), lambda _: None)
            load = _Load(model, engine, snapshot, shared)
            notes = load.run(model.optimizer if with_optimizer else None, partial=partial)
            shared(lambda: load_states(extra or {}, snapshot), lambda _: None)
        except BaseException:
            snapshot.close()
            raise
    model.num_steps = snapshot.manifest.step
    if engine.is_prepared:
        snapshot.close()
    else:
        model.stepper.when_prepared(lambda: _load_rest(model, snapshot, with_optimizer=with_optimizer))
    return Loaded(snapshot.manifest.step, snapshot.path, skipped, notes)


def _load_rest(model: ParallelModel, snapshot: OpenCheckpoint, *, with_optimizer: bool) -> None:
    """Load what has waited for the cut: the optimizer's state."""
    engine = model.engine
    try:
        load = _Load(model, engine, snapshot, functools.partial(together, engine.everyone, engine.device))
        load.run(model.optimizer if with_optimizer else None, again=True, partial=not with_optimizer)
    finally:
        snapshot.close()


def _is_awaited(shared: Callable[..., list[Any]], model: ParallelModel, directory: Path, step: int | None) -> bool:
    """Return whether a save under way is one of those that are to be looked at, after a look that ranks ask for the same."""

    def ask() -> list[Any]:
        saving = model.saving
        is_awaited = saving is not None and saving.goes_to(directory) and step in (None, saving.step)
        return [str(directory), step, is_awaited]

    rows = shared(ask, lambda asked: asked)
    asked = [row[:2] for row in rows]
    if any(row != asked[0] for row in asked):
        raise CheckpointError(
            f"ranks are to load different checkpoints (directory, step): {asked}",
            fix="pass the same arguments on every rank",
        )
    return rows[0][2]


def _open_sound(
    shared: Callable[..., list[Any]], rank: int, num_ranks: int, directory: Path, step: int | None
) -> tuple[OpenCheckpoint, list[tuple[Path, str]]]:
    """Return the newest checkpoint that all ranks together find sound, and those that were skipped."""
    tried: set[Path] = set()
    skipped: list[tuple[Path, str]] = []
    while (path := _find_next(shared, rank, directory, step, tried)) is not None:
        tried.add(path)
        opened: list[OpenCheckpoint] = []

        def look(path: Path = path, opened: list[OpenCheckpoint] = opened) -> list[Any]:
            try:
                opened.append(OpenCheckpoint(path))
                opened[0].check(rank, num_ranks)
            except (CheckpointError, StorageError) as error:
                return [error.message, os.path.lexists(path)]
            return [None, True]

        rows = shared(look, lambda told: told)
        reason = next((told for told, _ in rows if told is not None), None)
        if reason is None:
            return opened[0], skipped
        for snapshot in opened:
            snapshot.close()
        # One that is gone was deleted by a run that goes on saving, and is not damaged.
        if all(is_there for _, is_there in rows):
            skipped.append((path, reason))
    reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in skipped)
    wanted = "" if step is None else f" of step {step}"
    raise CheckpointError(
        f"no sound checkpoint{wanted} is in {directory}{reasons}",
        fix="name the directory that holds step-... directories, or train anew",
    )


def _find_next(
    shared: Callable[..., list[Any]], rank: int, directory: Path, step: int | None, tried: Collection[Path]
) -> Path | None:
    """Return the newest checkpoint that was not tried; None where there is none.

    The directory is looked at anew each time: a run that goes on saving there may delete what is about to be opened, and has a
    newer one by then.
    """

    def find() -> str | None:
        saved = _candidates(directory, step) if rank == 0 else []
        return next((str(own.path) for own in saved if own.path not in tried), None)

    found = shared(find, lambda path: path)[0]
    return None if found is None else Path(found)


def _candidates(directory: Path, step: int | None) -> list[Saved]:
    saved = Store(directory).saved()
    if not saved:  # perhaps a checkpoint's own directory
        saved = [own for own in Store(directory.absolute().parent).saved() if own.path.name == directory.name]
    return [own for own in saved if step is None or own.step == step]


def _fill(part: HeldPart, values: Tensor) -> None:
    """Copy values into a part, also into one whose entries share memory along a dim: `expand` made it.

    Raises:
        CheckpointError: Entries that share memory have different values in the file.
    """
    place, first = distinct_entries(part.tensor.detach(), values)
    if first is not values and memory_of(first.expand_as(values).contiguous()) != memory_of(values):
        raise CheckpointError(
            f"'{part.name}' has one value for several entries here (expand), and several in the checkpoint",
            fix="make it a tensor with memory for each entry: .clone()",
        )
    place.copy_(first)


class _Load:
    """One load, on one rank."""

    def __init__(
        self, model: ParallelModel, engine: Engine, snapshot: OpenCheckpoint, shared: Callable[..., list[Any]]
    ) -> None:
        self._model = model
        self._engine = engine
        self._snapshot = snapshot
        self._manifest = snapshot.manifest
        self._shared = shared

    def run(self, optimizer: torch.optim.Optimizer | None, *, again: bool = False, partial: bool = False) -> list[str]:
        """Read everything; `again` is after the cut, for what waited: a script may have written and drawn since the load."""
        parts = self._engine.held_state()
        differences = self._differences(parts)
        if differences and not partial:
            raise CheckpointError(
                f"{self._snapshot.path} is of another model: {tensors_differ(list(differences.values()))}",
                fix="build the model that was saved, or load what they have in common with partial=True, with_optimizer=False",
            )
        options = None if optimizer is None else self._options(optimizer, parts)
        if not again:
            common = [part for part in parts if f"{MODEL}/{stored_name(part.name)}" not in differences]
            self._shared(lambda: self._read_values(common), lambda _: None)
            self._engine.take_held_state()
        if optimizer is not None and options is not None:
            self._shared(lambda: self._read_optimizer(optimizer, options, parts, again=again), lambda _: None)
        notes = [f"partly loaded: {tensors_differ(list(differences.values()))}"] if differences and not again else []
        self._shared(lambda: notes.extend(self._continue_streams(again=again)), lambda _: None)
        self._model.stepper.state_was_loaded()
        return notes

    # -- what fits ------------------------------------------------------------------------------------------------

    def _differences(self, parts: Sequence[HeldPart]) -> dict[str, str]:
        """Return stored names of what differs between model and checkpoint, with a line on each; alike on all ranks."""
        kinds = {f"{MODEL}/{stored_name(p.name)}": [dtype_name(p.tensor.dtype), list(p.full_shape)] for p in parts}
        rows = self._shared(lambda: kinds, lambda told: told)
        present = {name: kind for row in rows for name, kind in row.items()}
        names = {*self._manifest.tensors, *self._manifest.aliases}
        stored = {name for name in self._manifest.tensors if name.startswith(f"{MODEL}/")}
        used = {self._manifest.aliases.get(name, name) for name in present}
        found = {name: "missing: " + name.removeprefix(f"{MODEL}/") for name in sorted(set(present) - names)}
        found |= {name: "unexpected: " + name.removeprefix(f"{MODEL}/") for name in sorted(stored - used)}
        for name in sorted(set(present) & names):
            entry = self._snapshot.entry(name)
            if [entry.dtype, list(entry.full_shape)] != present[name]:
                own = " ".join(map(str, present[name]))
                label = name.removeprefix(f"{MODEL}/")
                found[name] = f"{label}: {entry.dtype} {list(entry.full_shape)}, the model has {own}"
        return found

    def _options(self, optimizer: torch.optim.Optimizer, parts: Sequence[HeldPart]) -> tuple[dict[str, Any], list[Any]]:
        """Return state and options of the checkpoint for this optimizer."""
        groups = self._shared(lambda: OptimizerRows(optimizer, parts, stored_name).groups, lambda found: found)

        def find() -> tuple[dict[str, Any], list[Any]]:
            stored = self._manifest.state.get("optimizer")
            if not isinstance(stored, dict) or not isinstance(stored.get("state"), dict):
                raise CheckpointError(
                    f"{self._snapshot.path} has no optimizer's state",
                    fix="load it with with_optimizer=False: the optimizer then begins anew",
                )
            if stored.get("class") != type(optimizer).__name__:
                raise CheckpointError(
                    f"{self._snapshot.path} has the state of {stored.get('class')}, the model has {type(optimizer).__name__}",
                    fix="use that optimizer, or load with with_optimizer=False",
                )
            return stored["state"], find_groups(stored.get("groups") or [], merge_groups(groups), self._has_entries)

        return find()  # alike on all ranks

    # -- reading --------------------------------------------------------------------------------------------------

    def _read_values(self, parts: Sequence[HeldPart]) -> None:
        with torch.no_grad():
            for part in parts:
                values = self._snapshot.read(f"{MODEL}/{stored_name(part.name)}", part.layout, part.order)
                _fill(part, values.view(part.tensor.shape))

    def _has_entries(self, name: str) -> bool:
        name = f"{MODEL}/{name}"
        entry = self._manifest.tensors.get(self._manifest.aliases.get(name, name))
        return entry is None or 0 not in entry.full_shape

    def _read_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        found: tuple[dict[str, Any], list[Any]],
        parts: Sequence[HeldPart],
        *,
        again: bool,
    ) -> None:
        def read(name: str, part: HeldPart | None) -> Tensor:
            entry = self._snapshot.entry(name)
            is_cut = (
                part is not None and not part.has_whole_state and entry.full_shape == part.full_shape and entry.shape
            )
            if part is None or not is_cut:
                return self._snapshot.read(name)
            return self._snapshot.read(name, part.layout, part.order)

        reader = OptimizerReader(optimizer, read, stored_name)
        state, options = found
        if not again:  # a script may have set a learning rate since
            reader.load_options(options)
        if self._engine.is_prepared:
            reader.load_state(state, parts)

    def _continue_streams(self, *, again: bool) -> list[str]:
        places = self._manifest.state.get("places")
        rows = places if isinstance(places, list) and all(isinstance(row, dict) for row in places) else []
        place = place_of(self._model.plan, self._model.world.rank)
        own = {key: value for key, value in place.items() if key != "sizes"}
        source = source_of(rows, own, place["sizes"])
        if source is None:
            if not again:
                begin_streams(own["dp"], self._model.seed, self._manifest.step)
            draws = self._model.stepper.draws
            if draws is not None and not draws.is_off:
                return []  # what forwards draw does not depend on them
            return [
                "another number of data-parallel ranks: their random streams begin anew, from the seed and the step"
            ]
        prefix = f"{RANDOM}/rank-{source}/"
        names = [name for name in self._manifest.tensors if name.startswith(prefix)]
        streams = {name.removeprefix(prefix): self._snapshot.read(name) for name in names}
        (set_own_streams if again else set_streams)(self._engine, streams)
        return self._continue_compression(source if rows[source] == place else None)

    def _continue_compression(self, source: int | None) -> list[str]:
        names = [name for name in self._manifest.tensors if name.startswith(f"{COMPRESSION}/")]
        if not names or not self._engine.is_prepared:
            return []
        if source is None or self._manifest.plan != str(self._model.plan):
            return ["another plan: the unsent rest of compressed gradients was left out"]
        prefix = f"{COMPRESSION}/rank-{source}/"
        own = {name.removeprefix(prefix): self._snapshot.read(name) for name in names if name.startswith(prefix)}
        self._engine.load_compression_state({name: tensor.to(self._engine.device) for name, tensor in own.items()})
        return []
