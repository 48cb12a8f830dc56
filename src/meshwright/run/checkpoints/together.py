"""One rank's error, raised on every rank: nobody goes on with a save or a load that has failed somewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from meshwright.apply.shards.switch import ShardSwitch
from meshwright.comm.communicator import Communicator
from meshwright.errors import CheckpointError, MeshwrightError, StorageError

__all__: list[str] = []

T = TypeVar("T")
_KINDS: dict[str, type[MeshwrightError]] = {"CheckpointError": CheckpointError, "StorageError": StorageError}


def require_between_steps(switch: ShardSwitch, doing: str) -> None:
    """Raise CheckpointError where a rank does not hold what it holds between steps.

    Args:
        switch: The model's.
        doing: What is refused, for the error.
    """
    if not switch.is_between_steps:
        raise CheckpointError(
            f"{doing} inside of a step, a hook or `with model.whole_parameters():`, or after close(): what a rank holds there is "
            "not what it holds between steps",
            fix=f"call {doing} between two steps, on every rank",
        )


def together(group: Communicator, device: torch.device, run: Callable[[], T], tell: Callable[[T], Any]) -> list[Any]:
    """Run something on every rank, and return what each tells of its result, as JSON, in the order of the ranks.

    Args:
        group: The ranks.
        device: The device of the exchange.
        run: What this rank does; it exchanges nothing.
        tell: Returns JSON of the result.

    Raises:
        CheckpointError: That of the first rank that raised one, on every rank.
        StorageError: Likewise.
    """
    error: MeshwrightError | None = None
    told: Any = None
    try:
        told = tell(run())
    except (CheckpointError, StorageError) as caught:
        error = caught
    failure = None if error is None else [type(error).__name__, error.message, error.fix]
    rows = group.all_gather_json([failure, told], device=device)
    for rank, (failed, _) in zip(group.ranks, rows, strict=True):
        if failed is not None:
            if error is not None and failed == failure:
                raise error
            kind, message, fix = failed
            raise _KINDS[kind](message, fix=fix, rank=rank, is_told=True)
    return [told for _, told in rows]
