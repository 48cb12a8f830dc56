"""Opening of a training, for a run and for the trials of a comparison: the applied model, its loaders, the event of its start."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch.utils.data import DataLoader

from meshwright.describe.batches import HasShares
from meshwright.errors import ConfigError
from meshwright.run.applying import apply_plan
from meshwright.run.parallel_model import ParallelModel
from meshwright.train.config.types import TrainConfig
from meshwright.train.data.loader import make_loader
from meshwright.train.data.sources import Split, load_data, make_collate
from meshwright.train.losses import make_loss
from meshwright.train.models import make_build_model
from meshwright.train.optim import OptimizerFactory

__all__: list[str] = []


def apply_config(config: TrainConfig, *, starts: bool = True) -> ParallelModel:
    """Return the configuration's model under its plan; every rank of the plan calls this.

    Args:
        config: The configuration.
        starts: Whether training begins with it; a run that goes on has its weights from a checkpoint.
    """
    train = config.train
    return apply_plan(
        make_build_model(config, starts=starts),
        config.plan,
        loss_fn=make_loss(config),
        optimizer=OptimizerFactory(config),
        seed=train.seed,
        max_grad_norm=train.max_grad_norm,
        non_finite=train.non_finite,
        sentinel_every=train.sentinel_every,
        on_finding=train.on_finding,
        rng=train.rng,
        sync_batch_norm=train.sync_batch_norm,
    )


def open_loader(config: TrainConfig, model: HasShares, split: Split = "train", **changes: Any) -> Any:
    """Return a loader of the configuration's data; `changes` replace arguments of `make_loader`."""
    data = config.data
    arguments: dict[str, Any] = {
        "seed": config.train.seed,
        "global_batch_size": config.train.global_batch_size,
        "shuffle": data.shuffle,
        "drop_last": data.drop_last,
        "num_workers": data.num_workers,
        "prefetch": data.prefetch,
        "collate_fn": make_collate(config),
        "sample_rng": data.sample_rng,
    }
    dataset = load_data(config, split)
    if split == "eval" and isinstance(dataset, DataLoader):
        arguments["global_batch_size"] = None  # held-out batches may have a size of their own
    return make_loader(dataset, model, **(arguments | changes))


def endless(config: TrainConfig, loader: Any) -> Generator[Any]:
    """Yield a loader's batches, one epoch after the other.

    Raises:
        ConfigError: An epoch has no batch.
    """
    may_be_empty = loader.state_dict()["batch"] > 0  # nothing need be left of an epoch that is continued
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty and not may_be_empty:
            raise ConfigError(f"data.source = {config.data.source!r} gave no batch in an epoch")
        may_be_empty = False


def start_event(config: TrainConfig, model: ParallelModel, steps: int) -> dict[str, Any]:
    """Return what every run says of itself at its start."""
    return {
        "event": "run_started",
        "name": config.run_name,
        "plan": str(model.plan),
        "num_ranks": model.world.world_size,
        "device": str(model.world.device),
        "threads": torch.get_num_threads(),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": steps,
        "global_batch_size": config.train.global_batch_size,
    }
