"""One rank looks at the first batch, and tells the others what it saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError

__all__: list[str] = []

Run = Callable[[nn.Module], Any]


def tell_everyone(group: Communicator, device: torch.device, run: Run | None, look: Callable[[Run], Any]) -> Any:
    """Return, on every rank, the JSON value that `look` gave on the first rank that has a sample.

    Args:
        group: All ranks; each calls this.
        device: Where what is told travels.
        run: Runs the model and its loss on a small batch; None where this rank has no sample.
        look: Looks at the model with it.

    Raises:
        ApplyError: No rank has a sample, or the rank that looked raised.
        Exception: On that rank, what it raised.
    """
    able = group.all_gather_json(run is not None, device=device)
    if True not in able:
        raise ApplyError("no rank has a sample, so that the model's data flow cannot be seen", fix="pass a batch")
    first = able.index(True)
    told: Any = None
    failure: Exception | None = None
    if group.group_rank == first and run is not None:
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                told = {"seen": look(run)}
        except Exception as error:  # noqa: BLE001 - the user's forward: every rank must hear of it
            failure, told = error, f"{type(error).__name__}: {error}"
    answer = group.all_gather_json(told, device=device)[first]
    if failure is not None:
        raise failure
    if isinstance(answer, str):
        raise ApplyError(f"rank {first} could not follow the model's data flow: {answer}")
    return answer["seen"]
