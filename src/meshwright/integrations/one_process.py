"""Accelerate's state of a rank: one process, as far as data and gradients go, and a number, as far as logs and files go.

Accelerate deals batches out to processes, pads the last one and averages over processes. Under a plan each rank has the whole
batch and takes its part, as one process would; only rank 0 logs and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from meshwright.errors import MissingDependencyError
from meshwright.ranks.world import World

try:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
except ImportError as error:
    raise MissingDependencyError(
        f"this integration needs accelerate ({error})", fix="pip install 'meshwright[trainer]'"
    ) from error

__all__: list[str] = []


@contextlib.contextmanager
def read_by_each_rank(args: Any) -> Iterator[None]:
    """Make the accelerator of TrainingArguments inside the context, so that every rank reads a dataset without length.

    Accelerate lets its first process read such a dataset and hand batches on, also where a resumed run skips some.
    """
    config = args.accelerator_config
    before, config.dispatch_batches = config.dispatch_batches, False
    try:
        yield
    finally:
        config.dispatch_batches = before


def be_one_process(world: World) -> None:
    """Change accelerate's state of this process; it has to exist.

    Args:
        world: This process's place.
    """
    told: dict[str, Any] = {
        "distributed_type": DistributedType.NO,
        "backend": None,
        "num_processes": 1,
        "process_index": world.rank,
        "local_process_index": world.local_rank,
        "device": world.device,
    }
    for state in (PartialState, AcceleratorState):
        if state._shared_state:
            state._shared_state.update(told)
