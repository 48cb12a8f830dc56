"""Accelerate's state of a rank: one process, as far as data and gradients go, and a number, as far as logs and files go.

Accelerate deals batches out to processes, pads the last one and averages over processes. Under a plan each rank has the whole
batch and takes its part, as one process would; only rank 0 logs and writes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from meshwright.errors import MissingDependencyError
from meshwright.ranks.world import World

try:
    import transformers.trainer
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers.trainer_utils import seed_worker
except ImportError as error:
    raise MissingDependencyError(
        f"this integration needs transformers and accelerate ({error})", fix="pip install 'meshwright[trainer]'"
    ) from error

__all__: list[str] = []


class FirstProcess:
    """Accelerate's state as its first process has it.

    Args:
        state: This process's.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.process_index = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_state"], name)


@contextlib.contextmanager
def skipping_on_each_rank() -> Iterator[None]:
    """Have a resumed run skip batches on every rank inside the context, also where accelerate lets its first process read.

    Such a loader is made anew to skip, and would wait for that process again.
    """
    module: Any = transformers.trainer
    skip = module.skip_first_batches

    def skipped(loader: Any, num_batches: int = 0) -> Any:
        found: Any = skip(loader, num_batches)
        if isinstance(getattr(loader, "state", None), FirstProcess):
            found.state = FirstProcess(found.state)
        return found

    module.skip_first_batches = skipped
    try:
        yield
    finally:
        module.skip_first_batches = skip


def seed_workers_alike(loader: Any) -> None:
    """Have a loader's workers seed their generators as those of one process: transformers adds the process's number."""
    loader = getattr(loader, "base_dataloader", loader)  # accelerate wraps the one that makes the workers
    seed = getattr(loader, "worker_init_fn", None)
    if isinstance(seed, functools.partial) and seed.func is seed_worker:
        loader.worker_init_fn = functools.partial(seed.func, *seed.args, **{**seed.keywords, "rank": 0})


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
