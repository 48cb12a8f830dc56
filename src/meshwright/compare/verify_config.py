"""`meshwright verify`: a configuration's model and data, under a plan and in one plain process.

Does not import torch before the configuration is read: a file that is not there is told in a fraction of the time.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, StorageError
from meshwright.ranks.capacity import check_devices
from meshwright.ranks.environment import read_place
from meshwright.train.config.deepspeed import show_rows
from meshwright.train.config.imports import add_to_path
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainConfig

if TYPE_CHECKING:
    from meshwright.describe.batches import BatchSplitter
    from meshwright.measure.verify import ParityReport

__all__: list[str] = []

EXIT_EQUAL = 0
EXIT_NOT_EQUAL = 1


def run_verification(
    config_path: str | Path,
    plan: str,
    steps: int = 3,
    json_path: str | Path | None = None,
    overrides: list[str] | None = None,
) -> int:
    """Verify a plan on a configuration's own model, data, loss and clipping, and show the report.

    The optimizer is plain SGD whatever the configuration says: AdamW hides a constant factor in the gradients.

    Returns:
        The exit code: 0 where the plan is equal to one process, else 1.

    Raises:
        ConfigError: The configuration, the plan or an override is wrong, or the JSON file's folder is not there.
        StorageError: The JSON file cannot be written.
    """
    if json_path is not None and not Path(json_path).absolute().parent.is_dir():
        raise ConfigError(f"--json {json_path}: there is no folder {Path(json_path).absolute().parent}")
    config = load_config(config_path, overrides or [], plan=plan)
    place = read_place(os.environ)
    if place.rank == 0:
        show_rows(config.plan_rows, sys.stderr)
    report = verify_config(config, steps)
    if place.rank != 0:  # torchrun ends all ranks with the first that fails, and rank 0 has the report to write
        return EXIT_EQUAL
    sys.stdout.write(report.to_text() + "\n")
    if json_path is not None:
        try:
            Path(json_path).write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"the report could not be written to {json_path}: {error.strerror}") from error
    return EXIT_EQUAL if report.equal else EXIT_NOT_EQUAL


def verify_config(config: TrainConfig, steps: int = 3) -> ParityReport:
    """Verify the plan of a configuration; see `run_verification`. In a job of torchrun or srun its ranks do it together."""
    place = read_place(os.environ)
    if place.world_size == 1:
        check_devices(config.plan.num_devices, str(config.plan))
    elif config.plan.num_ranks != place.world_size:
        raise ConfigError(
            f"the plan '{config.plan}' has {config.plan.num_ranks} ranks, {place.source} has started {place.world_size}",
            fix=f"start {config.plan.num_ranks} ranks, or run meshwright verify without {place.source}",
        )
    else:
        from meshwright.ranks.join import join_world

        with join_world(timeout_s=config.train.timeout_s).sharing_failures():
            return _verify(config, steps)
    return _verify(config, steps)


def _verify(config: TrainConfig, steps: int) -> ParityReport:
    add_to_path(config.import_roots)
    from meshwright.measure.verify import verify_plan
    from meshwright.train.losses import make_loss
    from meshwright.train.models import make_build_model

    return verify_plan(
        make_build_model(config),
        config.plan,
        _first_batches(config, steps),
        make_loss(config),
        num_steps=steps,
        seed=config.train.seed,
        max_grad_norm=config.train.max_grad_norm,
        rng=config.train.rng,
    )


class _WholeBatches:
    """The attributes that the loader reads of a model, for one that takes whole global batches."""

    dp_rank = 0
    dp_size = 1

    def __init__(self, splitter: BatchSplitter) -> None:
        self.splitter = splitter


def _first_batches(config: TrainConfig, steps: int) -> list[Any]:
    """Return the first global batches of the run, starting a new epoch where the data is short."""
    from meshwright.describe.batches import BatchSplitter
    from meshwright.train.opening import endless, open_loader

    loader = open_loader(config, _WholeBatches(BatchSplitter()), num_workers=0, prefetch=0)
    return list(itertools.islice(endless(config, loader), steps))
