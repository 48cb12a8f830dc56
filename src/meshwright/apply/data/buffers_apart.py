"""Buffers that a forward changes by a rank's own samples: a centre of outputs, a codebook's averages, a queue of rows.

They follow rank 0, as BatchNorm's statistics do, so that they are not one device's, nor what is computed with them. BatchNorm's
are known for it; of others the plan's reasons tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from meshwright.comm.communicator import Communicator

__all__: list[str] = []

_TIMES = 3
"""How often ranks compare them: two shares differ in the first batches already [count]."""
_MOST_SHOWN = 4
_KNOWN = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class BuffersApart:
    """Finds such buffers before they are made equal.

    Args:
        group: The ranks of a batch.
        device: Where digests travel.
    """

    def __init__(self, group: Communicator, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._left = _TIMES
        self.reasons: tuple[str, ...] = ()

    def look(self, module: nn.Module, common: Collection[Tensor]) -> None:
        """Compare the buffers that all ranks have; every rank calls it.

        Args:
            module: The model.
            common: Buffers with one shape and dtype on all ranks.
        """
        if self._group.size == 1 or not self._left or self.reasons:
            return
        self._left -= 1
        own = dict(_digests(module, common))
        told = self._group.all_gather_json(own, device=self._device)
        apart = [name for name in told[0] if any(theirs.get(name) != told[0][name] for theirs in told)]
        if apart:
            more = f" and {len(apart) - _MOST_SHOWN} more" if len(apart) > _MOST_SHOWN else ""
            names = ", ".join(f"'{name}'" for name in apart[:_MOST_SHOWN])
            self.reasons = (
                f"buffers: the forward changes {names}{more} by the samples of each rank, and all take rank 0's: they are not "
                "one device's, nor is what is computed with them; keep them outside of the model by what meshwright.gather_batch "
                "gives, or leave the batch whole (dp=1; tp and pp do)",
            )


def _digests(module: nn.Module, common: Collection[Tensor]) -> Iterator[tuple[str, str]]:
    """Yield (FQN, digest) of floating buffers, of modules other than torch's norms: a whole number counts calls, as a rule."""
    wanted = {id(tensor) for tensor in common}
    for path, child in module.named_modules():
        if isinstance(child, _KNOWN):
            continue
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point() and id(buffer) in wanted:
                held = buffer.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
                yield f"{path}.{name}" if path else name, hashlib.blake2b(held, digest_size=8).hexdigest()
