"""What ranks agree on beside the score: units that one needs once more than it says, and the memory that all can spare."""

from __future__ import annotations

import psutil
import torch

from meshwright.comm.communicator import Communicator

__all__: list[str] = []


class Requests:
    """Small exchanges, in one place on all ranks, that tell which unit some rank needs beside the score.

    A rank whose own data has it call a layer again, after the layer's values were let go of, cannot gather them by itself: the
    others are elsewhere. It plays the score to the end of the phase, asks here, and everyone gathers what it asks for.

    Args:
        group: The data-parallel ranks, which share the score.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group

    def agree(self, wanted: int | None) -> int | None:
        """Return one unit that some rank wants, the same on all ranks; None where no rank wants any.

        Args:
            wanted: The unit that this rank wants, or None where it is done with this phase.
        """
        highest = torch.tensor([-1 if wanted is None else wanted], dtype=torch.int64)
        self._group.all_reduce(highest, "max")
        unit = int(highest)
        return None if unit < 0 else unit


def spare_bytes(group: Communicator, device: torch.device) -> int:
    """Return how much memory every rank can spare for the time of one step: a quarter of what is free [bytes]."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // group.size
    least = torch.tensor([free // 4], dtype=torch.int64, device=device)
    group.all_reduce(least, "min")
    return int(least)
