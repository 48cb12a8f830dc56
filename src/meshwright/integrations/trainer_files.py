"""Files of transformers' Trainer under a plan: what one process saves, and ranks' parts for every plan."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import transformers  # where it is missing, `hf_trainer` has said so before

from meshwright.errors import ApplyError
from meshwright.integrations import optimizer_file, sealed, share_streams
from meshwright.integrations.planned import bare, kept_config
from meshwright.ranks.world import World
from meshwright.run.checkpoints.loading import load_checkpoint
from meshwright.run.checkpoints.saving import forget_others, save_checkpoint
from meshwright.run.parallel_model import ParallelModel
from meshwright.spec import Plan

__all__: list[str] = []

DIRECTORY = sealed.PARTS
"""Of a checkpoint of the Trainer: the parts of model and optimizer, which load under every plan."""


class TrainerFiles(transformers.Trainer):
    """What a Trainer under a plan saves and loads; `hf_trainer.Trainer` sets the attributes."""

    _world: World
    plan: Plan
    parallel: ParallelModel | None
    _groups: list[list[str]]
    _tied: dict[str, str]

    @property
    def _has_ranks(self) -> bool:
        return self._world.world_size > 1

    def _barrier(self) -> None:
        if self._has_ranks:
            self._world.default_group.barrier()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the whole model, by rank 0; every rank calls it."""
        if self.parallel is not None and state_dict is None:
            state_dict = self.parallel.full_state_dict()
            # One tensor, as in one process.
            state_dict |= {name: state_dict[first] for name, first in self._tied.items()}
        # peft asks modules by themselves for what it saves.
        whole = self._whole() if hasattr(self.model, "peft_config") else contextlib.nullcontext()
        with kept_config(self.model), whole:
            super()._save(output_dir, state_dict)
        self._barrier()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save all that a resumed run needs; every rank calls it, and none goes on before the files are there.

        Raises:
            StorageError: The disk is full or fails.
        """
        directory = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with sealed.written(directory):
            if self.args.should_save:
                sealed.break_seal(directory)
            super()._save_checkpoint(model, trial)
            if self.args.should_save and directory.is_dir():
                sealed.seal(directory)
        self._barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer's state twice where ranks have parts of it: for every plan, and as one process does."""
        if self.parallel is None or not self._has_ranks:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        directory = Path(output_dir) / DIRECTORY
        # Of an earlier Trainer, whose checkpoint transformers overwrites as well.
        forget_others(self.parallel, directory)
        saved = save_checkpoint(self.parallel, directory, step=self.state.global_step)
        if self.args.should_save:
            options = self.parallel.optimizer.param_groups
            state = optimizer_file.read_whole(saved, self._groups, options)
            torch.save(state, os.path.join(output_dir, "optimizer.pt"))
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer's state that a Trainer under any plan has saved, or one process."""
        directory = None if checkpoint is None else Path(checkpoint) / DIRECTORY
        if directory is None or self.parallel is None or not self._has_ranks:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if directory.is_dir():
            with share_streams.kept(self._world.device):
                load_checkpoint(self.parallel, directory)
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(torch.load(directory.parent / "scheduler.pt", weights_only=True))
        elif (self.plan.zero or self.plan.tp > 1) and (directory.parent / "optimizer.pt").exists():
            raise ApplyError(
                f"{checkpoint} was saved by one process, whole, and under the plan '{self.plan}' ranks have parts of the "
                "optimizer's state",
                fix=f"resume it with plan='dp={self._world.world_size}' and save once, which loads under every plan",
            )
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the whole model's weights."""
        with self._whole():
            super()._load_from_checkpoint(resume_from_checkpoint, None if model is None else bare(model))

    def _load_best_model(self) -> None:
        """Load the whole model's weights.

        Raises:
            CheckpointError: They are not as they were saved.
        """
        sealed.refuse_damaged(self._world, self.state.best_model_checkpoint)
        with self._whole():
            super()._load_best_model()

    def _whole(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.parallel is None else self.parallel.whole_parameters()

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the generators' state, which is alike on all ranks."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)
