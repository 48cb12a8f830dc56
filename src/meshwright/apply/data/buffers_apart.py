"""Buffers that a forward changes by a rank's own samples: a centre of outputs, a codebook's averages, a queue of rows.

They follow rank 0, as BatchNorm's statistics do, so that they are not one device's, nor what is computed with them. BatchNorm's
are known for it; of others the plan's reasons tell. The count of a tensor's writes does not show all of them: a write through
`.data`, and running statistics that `torch.nn.functional` writes. So the first steps compare values, and a later one does where
a buffer is written that was not before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from meshwright.apply.state.buffers import buffer_digests
from meshwright.comm.communicator import Communicator
from meshwright.errors import some_of

__all__: list[str] = []

_TIMES = 3
"""How often ranks compare them: two shares differ in the first batches already [count]."""
_MOST_SHOWN = 4


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
        self._is_uncounted = False
        self._before: dict[str, str] = {}
        self._seen: set[str] = set()
        """Names of buffers whose counted writes were looked at, on any rank."""
        self._told: set[str] = set()
        self.reasons: tuple[str, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether buffers are looked at after this step, though no write into one was counted."""
        return self._group.size > 1 and (self._left > 0 or self._is_uncounted)

    def begin(self, module: nn.Module) -> None:
        """Note the values from which a forward begins: one that differs between ranks by then is left to sentinels."""
        if self._group.size > 1 and self._left:
            self._before = {name: digest for name, _, _, digest in buffer_digests(module)}

    def has_fresh(self, module: nn.Module, find_written: Callable[[], set[int]]) -> bool:
        """Tell whether a buffer was written on this rank that was not in the steps that were looked at."""
        if self._left or self._group.size == 1:
            return False
        written = find_written()
        return any(id(buffer) in written and name not in self._seen for name, buffer in module.named_buffers())

    def look_again(self) -> None:
        """Have the next `look` compare once more."""
        self._left, self._before = 1, {}

    def look(self, module: nn.Module, common: Collection[Tensor], find_written: Callable[[], set[int]]) -> bool:
        """Compare the buffers that all ranks have, and tell whether they have to be made equal; every rank calls it.

        Args:
            module: The model.
            common: Buffers with one shape and dtype on all ranks.
            find_written: Returns the ids of buffers of which torch has counted a write since they were equal.
        """
        if self._group.size == 1 or not self._left:
            return True
        self._left -= 1
        written = find_written()
        self._seen.update(name for name, buffer in module.named_buffers() if id(buffer) in written)
        wanted = {id(tensor) for tensor in common}
        found = [(name, t, is_norm, digest) for name, t, is_norm, digest in buffer_digests(module) if id(t) in wanted]
        own = {name: (digest, id(buffer) in written, self._before.get(name)) for name, buffer, _, digest in found}
        told = self._group.all_gather_json([own, bool(written)], device=self._device)
        digests = [theirs for theirs, _ in told]
        self._seen.update(name for theirs in digests for name, (_, is_counted, _) in theirs.items() if is_counted)
        apart = [
            name
            for name, (digest, _, before) in digests[0].items()
            if any(theirs.get(name, [""])[0] != digest for theirs in digests)
            and all(theirs.get(name, ["", False, before])[2] == before for theirs in digests)
        ]
        if any(not any(theirs.get(name, ["", False])[1] for theirs in digests) for name in apart):
            self._is_uncounted = True
        norms = {name for name, _, is_norm, _ in found if is_norm}
        self._tell([n for n, t, _, _ in found if n in apart and n not in norms and t.is_floating_point()])
        return bool(apart) or any(is_written for _, is_written in told)

    def _tell(self, apart: list[str]) -> None:
        apart = [name for name in apart if name not in self._told]
        self._told.update(apart)
        if apart:
            names = some_of([f"'{name}'" for name in apart], _MOST_SHOWN)
            self.reasons += (
                f"buffers: {names} change otherwise on each rank, and all take rank 0's: they are not one device's, nor is what "
                "is computed with them. Where the forward changes them by its samples, keep them outside of the model by what "
                "meshwright.gather_batch gives, or leave the batch whole (batch=whole; tp and pp do); where the script draws "
                "them, give ranks a generator of one seed",
            )
