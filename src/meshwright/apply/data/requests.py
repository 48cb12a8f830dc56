"""Requests for units outside the exchange order, agreed on by all ranks, and the memory that all can spare."""

from __future__ import annotations

import psutil
import torch

from meshwright.comm.communicator import Communicator

__all__: list[str] = []


def agree_on_unit(group: Communicator, wanted: int | None) -> int | None:
    """Return one unit that some rank needs outside the exchange order, the same on all ranks; None where none needs any.

    A rank whose data makes it call a layer again, after the layer's values were released, cannot gather them alone: the other
    ranks are elsewhere. It runs the order to the end of the phase and asks here; then all ranks gather that unit.

    Args:
        group: The data-parallel ranks, which follow one order.
        wanted: The unit that this rank wants, or None where it is done with this phase.
    """
    highest = torch.tensor([-1 if wanted is None else wanted], dtype=torch.int64)
    group.all_reduce(highest, "max")
    unit = int(highest)
    return None if unit < 0 else unit


def spare_bytes(group: Communicator, device: torch.device) -> int:
    """Return the memory that every rank can spare during a step: a quarter of the smallest free memory [bytes]."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // group.size
    least = torch.tensor([free // 4], dtype=torch.int64, device=device)
    group.all_reduce(least, "min")
    return int(least)
