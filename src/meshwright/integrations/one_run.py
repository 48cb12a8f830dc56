"""One run at a time in a Trainer's folder: two that save there side by side would leave checkpoints with files of both."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import DirectoryInUseError
from meshwright.ranks.world import World

__all__: list[str] = []

_held: set[int] = set()
"""Descriptors of folders that this process holds."""


@contextlib.contextmanager
def holding(world: World, args: Any) -> Iterator[None]:
    """Hold the folder where a run saves inside the context, by the first rank; it is made if need be. Every rank enters it.

    The kernel's `flock` on the folder itself decides: it leaves no file, and ends with its process, however that ends.
    A folder that cannot be made or locked is left to whoever writes there.

    Args:
        world: This process's place.
        args: The rank's `TrainingArguments`; the first rank's count.

    Raises:
        DirectoryInUseError: On every rank: another process holds it.
    """
    saves = world.rank == 0 and bool(args.output_dir) and args.save_strategy != "no"
    descriptor, is_free = _take(Path(args.output_dir)) if saves else (None, True)
    try:
        told = world.default_group.all_gather_json(is_free, device=world.device) if world.world_size > 1 else [is_free]
        if not all(told):
            raise DirectoryInUseError(
                f"another run is training in {args.output_dir} (rule: one run for each folder)",
                fix="wait for it, or give this run another output_dir",
            )
        yield
    finally:
        if descriptor is not None:
            _held.discard(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _take(folder: Path) -> tuple[int | None, bool]:
    """Return the descriptor that holds a folder, None where there is none, and whether no other process has it."""
    descriptor = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if descriptor is not None:
            os.close(descriptor)
        return None, False
    except (OSError, ValueError):  # a file system without locks, one that is full, a name that is none
        if descriptor is not None:
            os.close(descriptor)
        return None, True
    _held.add(descriptor)
    return descriptor, True


def _let_go_in_child() -> None:
    # A worker that outlives its rank would hold the folder against the run that goes on.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)
