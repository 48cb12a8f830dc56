"""save_checkpoint: what all ranks hold, written once, durable and whole when it returns."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from meshwright.checkpoint.manifest import FileEntry, Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.store import SaveUnderWay, Store
from meshwright.checkpoint.tensor_files import TensorFile
from meshwright.errors import CheckpointError, StorageError
from meshwright.layout import ShardLayout
from meshwright.run.checkpoints.background import BackgroundSave, finish, look
from meshwright.run.checkpoints.extra_states import digest_of_states, states_of
from meshwright.run.checkpoints.live_share import LiveShare, memory_for, no_room
from meshwright.run.checkpoints.optimizer_rows import merge_groups, merge_state
from meshwright.run.checkpoints.stored_parts import RankState, collect, place_of, trained_names, writers_of
from meshwright.run.checkpoints.together import require_between_steps, together
from meshwright.run.options import check_directory, check_save
from meshwright.run.parallel_model import ParallelModel

__all__: list[str] = []

_LOG = logging.getLogger(__name__)
_savers: weakref.WeakSet[ParallelModel] = weakref.WeakSet()
"""Models that have saved."""


def save_checkpoint(
    model: ParallelModel,
    directory: str | Path,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    with_optimizer: bool = True,
    in_background: bool = False,
) -> Path:
    """Save a model under a plan, so that any other plan can load it; every rank calls it, between steps.

    Parameters, persistent buffers, the optimizer's state and options, generators and the rest of compressed gradients are saved,
    each entry once. When it returns, the files are on the disk and complete: whatever ends the program before that leaves
    the checkpoints of before as they were. Attributes of modules beside parameters and buffers are not saved, as in torch.

    Args:
        model: What `apply_plan` returned.
        directory: Where checkpoints of this run lie, on a file system that all ranks see; made if it is not there.
        step: Steps of the optimizer that have been taken; part of the checkpoint's name [count].
        extra: Name -> object with `state_dict()`, such as a loader or a learning rate schedule. Its state is made of dicts,
            lists, tuples, Counters, numbers, texts and None, and is equal on all ranks.
        keep: How many checkpoints stay in the directory, the newest and this one; None keeps all [count].
        with_optimizer: Whether the optimizer's state is saved.
        in_background: Return before the files are written. Parameters and the optimizer's state are read until the next step
            updates them; do not write into them before that without `wait_for_checkpoint`. A write is found, and the save then
            fails or has the values of before. What goes wrong is raised by the next step, save or `wait_for_checkpoint`, on
            every rank, and training may go on after it.

    Returns:
        The checkpoint's own directory; in the background it is not there yet.

    Raises:
        ConfigError: A number is out of range, or no whole number.
        CheckpointError: The state has something that cannot be saved, or another model of this program, which is not closed, has
            saved this step there.
        StorageError: The disk is full or fails; the checkpoints of before are intact.
    """
    check_save(step, keep)
    place = check_directory("save_checkpoint", directory)
    return save(
        model, place, step, extra or {}, Retention(keep), with_optimizer=with_optimizer, in_background=in_background
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Retention:
    """What stays of the checkpoints of before, and who is told what is not as asked for."""

    keep: int | None = None
    """How many of the newest, the new one included; None: all [count]."""
    also: tuple[int, ...] = ()
    """Steps that stay in any case."""
    warn: Callable[[str], object] = _LOG.warning
    """Called with a text on the first rank, in the background by its thread."""
    steps_look: bool = True
    """Whether steps look after a save in the background; else the caller does."""

    def apply(self, store: Store, path: Path) -> None:
        """Delete what need not stay; on the first rank, once a checkpoint is committed.

        Args:
            store: The run's directory.
            path: The checkpoint.
        """
        try:
            later = [saved.path for saved in store.saved()[:1] if saved.path.name != path.name]
            if later:
                self.warn(f"{later[0]}, saved before, is of a later step than {path}: load_checkpoint takes it")
            if self.keep is not None:
                store.retain(self.keep, self.also, own=path)
        except StorageError as error:  # it is saved, and there is one more than was asked for
            self.warn(f"an old checkpoint stays: {error.message}")


def save(
    model: ParallelModel,
    directory: str | Path,
    step: int,
    extra: Mapping[str, Any],
    retention: Retention,
    *,
    with_optimizer: bool = True,
    in_background: bool = False,
) -> Path:
    """Save a model as `save_checkpoint` does, with more to say about what stays."""
    require_between_steps(model.engine.switch, "save_checkpoint")
    if model.stepper.is_waiting:
        raise CheckpointError(
            f"the plan '{model.plan}' cuts the model at its first batch, and what was built or loaded waits for the first batch: "
            "a save now would not have all of it",
            fix="save after the first step, or pass example_batch= to apply_plan",
        )
    with model.told("save"), model.engine.switch.plain():
        optimizer = model.optimizer if with_optimizer else None
        own = model.stepper.gate.own
        if own is not None and own.has_pending() and model.engine.everyone.group_rank == 0:
            retention.warn(
                "gradients of model.backward() that the optimizer has not used yet are no part of a checkpoint: a run that goes "
                "on from it begins this accumulation anew. Save after model.optimizer.step()"
            )
        model.stepper.sentinels.refuse_apart()
        finish(model)
        saving = _Save(model, Store(Path(directory)), step, retention)
        path = saving.run(extra, optimizer, in_background=in_background)
    model.last_saves[os.path.realpath(directory)] = step
    _savers.add(model)
    return path


def _has_other(model: ParallelModel, directory: Path, step: int) -> bool:
    """Tell whether another model of this program, which lives, has saved this step there."""

    def is_there() -> bool:
        root = os.path.realpath(directory)
        return any(other is not model and other.last_saves.get(root) == step for other in tuple(_savers))

    if is_there():
        gc.collect()  # one that nobody has any more may wait for this
    return is_there()


def forget_others(model: ParallelModel, directory: str | Path) -> None:
    """Let a save of this model replace those of other models there, as whoever writes a whole directory anew does."""
    root = os.path.realpath(directory)
    for other in tuple(_savers):
        if other is not model:
            other.last_saves.pop(root, None)


def wait_for_checkpoint(model: ParallelModel) -> None:
    """Return when a save in the background is on the disk; every rank calls it.

    Raises:
        StorageError: The disk is full or fails, on any rank; the checkpoints of before are intact.
    """
    with model.told("save"), model.engine.switch.plain():
        finish(model)


def is_saved(model: ParallelModel) -> bool:
    """Return whether no save in the background is under way any more, without waiting; every rank calls it.

    Raises:
        StorageError: It has failed, on any rank.
    """
    with model.told("save"), model.engine.switch.plain():
        return look(model)


class _Save:
    """One save, on one rank."""

    def __init__(self, model: ParallelModel, store: Store, step: int, retention: Retention) -> None:
        engine = self._engine = model.engine
        self._model = model
        self._store = store
        self._step = step
        self._retention = retention
        self._together = functools.partial(together, engine.everyone, engine.device)
        self._is_first = engine.everyone.group_rank == 0
        # Read now: a look at the module's parameters inside a step, by the thread that commits, would gather them under ZeRO-3.
        self._plan = str(model.plan)

    def run(self, extra: Mapping[str, Any], optimizer: Any, *, in_background: bool) -> Path:
        held = self._engine.held_state()
        rank = self._engine.everyone.group_rank
        own: list[RankState] = []

        def look() -> RankState:
            own.append(collect(self._engine, held, optimizer, place_of(self._model.plan, self._model.world.rank), rank))
            states = states_of(extra)
            own[0].told["has_other"] = _has_other(self._model, self._store.root, self._step)
            own[0].told["extra"] = [digest_of_states(states), states if rank == 0 else {}]
            return own[0]

        wanted = [str(self._store.root), self._step, self._retention.keep, in_background]
        told = self._together(look, lambda state: [state.rows(), {**state.told, "wanted": wanted}])
        rows = [row for row, _ in told]
        asked = [state["wanted"] for _, state in told]
        if any(row != asked[0] for row in asked):
            raise CheckpointError(
                f"ranks are to save in different ways (directory, step, keep, in_background): {asked}",
                fix="pass the same arguments on every rank",
            )
        if any(state["has_other"] for _, state in told):
            raise CheckpointError(
                f"another model of this program has saved step {self._step} in {self._store.root} (rule: a directory for each "
                "model; the newest save of a step is the one that is loaded)",
                fix="give each model a directory of its own, or close() the other one",
            )
        _require_alike([state["extra"][0] for _, state in told])
        writers = writers_of(rows)
        draft = self._begin()
        try:
            mine = sorted(place for held in writers.values() for writer, place in held if writer == rank)
            tensors = [(own[0].parts[place].name, own[0].parts[place].tensor) for place in mine]
            commit = functools.partial(self._commit, draft, told=told, writers=writers)
            if in_background:
                self._model.saving = self._in_background(draft, tensors, mine, commit)
                return draft.final_path
            file = TensorFile(tensors)
            entries = self._together(lambda: self._write(draft, file, rank, mine), lambda entry: entry)
            paths = self._together(lambda: commit(entries) if self._is_first else None, lambda path: path)
            return Path(paths[0])
        except BaseException:
            if self._is_first:
                draft.discard()
            raise

    def _begin(self) -> SaveUnderWay:
        def begin() -> list[Any]:
            if not self._is_first:
                return []
            draft = self._store.begin(self._step)
            return [str(draft.path), draft.step, draft.epoch]

        path, step, epoch = self._together(begin, lambda row: row)[0]
        return SaveUnderWay(Path(path), step, epoch)

    def _in_background(
        self,
        draft: SaveUnderWay,
        tensors: Sequence[tuple[str, Tensor]],
        mine: Sequence[int],
        commit: Callable[..., str],
    ) -> BackgroundSave:
        """Start writing this rank's share in a thread, or one that raises what was wrong with it."""
        rank, share = self._engine.everyone.group_rank, None
        try:
            share = LiveShare(tensors, self._staying(), memory_for(self._model.module), draft.step)
            write = functools.partial(self._write, draft, share.file, rank, mine, share.check)
        except (MemoryError, RuntimeError) as error:
            # Told as what a disk does is: the other ranks have begun by now, and have nothing to wait for here.
            write = functools.partial(_fail, no_room(sum(tensor.nbytes for _, tensor in tensors), draft.step, error))
        calls = self._model.world.calls
        return BackgroundSave(
            draft,
            share=share,
            write=write,
            commit=commit,
            place=(rank, self._engine.everyone.size),
            has_given_up=lambda: calls.has_given_up,
            steps_look=self._retention.steps_look,
        )

    def _staying(self) -> frozenset[str]:
        """Return the names of what an optimizer's step alone changes; nothing where no step of ours tells of itself before."""
        optimizer = self._model.optimizer
        if optimizer is None or not self._engine.is_prepared:
            return frozenset()
        return trained_names(self._engine.held_state(), optimizer)

    def _write(
        self,
        draft: SaveUnderWay,
        file: TensorFile,
        rank: int,
        mine: Sequence[int],
        check: Callable[[bytes], object] | None = None,
    ) -> list[Any] | None:
        if not mine:
            return None
        entry = draft.write(f"rank-{rank:05d}.safetensors", file, check)
        return [
            entry.name,
            entry.num_bytes,
            entry.table_digest.hex(),
            dict(zip(map(str, mine), file.offsets, strict=True)),
        ]

    def _commit(
        self,
        draft: SaveUnderWay,
        entries: Sequence[Any],
        *,
        told: Sequence[Any],
        writers: Mapping[str, Sequence[tuple[int, int]]],
    ) -> str:
        path = draft.commit(self._manifest(draft, entries, told, writers))
        self._retention.apply(self._store, path)
        return str(path)

    def _manifest(
        self,
        draft: SaveUnderWay,
        entries: Sequence[Any],
        told: Sequence[Any],
        writers: Mapping[str, Sequence[tuple[int, int]]],
    ) -> Manifest:
        files = [(rank, entry) for rank, entry in enumerate(entries) if entry is not None]
        number_of = {rank: number for number, (rank, _) in enumerate(files)}
        tensors: dict[str, TensorEntry] = {}
        for name, held in writers.items():
            parts = []
            for rank, place in held:
                _, _, shape, dim, ranges, flat, _ = told[rank][0][place]
                layout = ShardLayout(shape=shape, dim=dim, ranges=ranges, flat=flat)
                parts.append(StoredPart(number_of[rank], entries[rank][3][str(place)], layout))
            rank, place = held[0]
            _, dtype, shape, *_, order = told[rank][0][place]  # alike on all ranks, as `writers_of` has seen
            tensors[name] = TensorEntry(dtype, tuple(shape), tuple(parts), tuple(order))
        states = [state for _, state in told]
        aliases = {name: stored for state in reversed(states) for name, stored in state["aliases"].items()}
        return Manifest(
            step=draft.step,
            epoch=draft.epoch,
            plan=self._plan,
            files=tuple(FileEntry(name, size, bytes.fromhex(digest)) for _, (name, size, digest, _) in files),
            tensors=tensors,
            aliases={name: stored for name, stored in aliases.items() if name not in tensors},
            state={
                "places": [state["place"] for state in states],
                "seed": self._model.seed,
                "optimizer": self._optimizer_of(states),
                **states[0]["extra"][1],
            },
        )

    def _optimizer_of(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        if "state" not in states[0]:
            return None
        return {
            "class": type(self._model.optimizer).__name__,
            "state": merge_state([state["state"] for state in states]),
            "groups": merge_groups([state["groups"] for state in states]),
        }


def _fail(error: StorageError) -> NoReturn:
    raise error


def _require_alike(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise an error where the states of `extra` differ between ranks: one of them would come back on all."""
    names = sorted({name for row in digests for name in row})
    different = [name for name in names if any(row.get(name) != digests[0].get(name) for row in digests)]
    if different:
        raise CheckpointError(
            f"extra {different} has another state on other ranks than on the first (rule: equal on all ranks; one is saved)",
            fix="pass what is the same on every rank, or leave it out",
        )
