"""The dtype that forwards and losses are cast to: the plan's, or that of the `torch.autocast` which a step is called in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError

__all__: list[str] = []

_DTYPES = {
    dtype: number
    for number, dtype in enumerate([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
}


class Autocast:
    """Casts where a plain loop would: in forward and loss, and not in what the step does beside them.

    Args:
        kind: The type of device that the model runs on.
        planned: The plan's dtype; None for the model's own.
    """

    def __init__(self, kind: str, planned: torch.dtype | None) -> None:
        self._kind = kind
        self._planned = planned
        self.dtype = planned
        """What forwards run in now; None for the model's own."""

    @contextlib.contextmanager
    def taken_in(self) -> Iterator[None]:
        """Take the autocast that this is called in off, inside, and hold it for the forwards there.

        Raises:
            ApplyError: It is another than the plan's.
        """
        if not torch.is_autocast_enabled(self._kind):
            yield
            return
        found = torch.get_autocast_dtype(self._kind)
        if self._planned not in (None, found):
            raise ApplyError(
                f"the plan's precision casts forwards to {self._planned}, and this is called under torch.autocast to {found}",
                fix="leave one of them out: torch.autocast around the step, or precision= of the plan",
            )
        self.dtype = found
        try:
            with torch.autocast(self._kind, enabled=False):
                yield
        finally:
            self.dtype = self._planned

    def in_forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that forward and loss run in; it counts for threads that were not in the user's, too."""
        if self.dtype is None and not torch.is_autocast_enabled(self._kind):
            return contextlib.nullcontext()
        return torch.autocast(self._kind, dtype=self.dtype, enabled=self.dtype is not None)


def code_of(dtypes: Sequence[torch.dtype]) -> int:
    """Return a small number for the dtypes of a micro-batch's outputs and loss."""
    return sum((_DTYPES.get(dtype, 0) + 1) * 32**place for place, dtype in enumerate(dtypes))


def raise_dtypes(group: Communicator, of_terms: Sequence[Sequence[torch.dtype]], device: torch.device) -> NoReturn:
    """Raise an error that names two micro-batches whose outputs are of other dtypes; on every rank."""
    told = group.all_gather_json([[str(dtype) for dtype in dtypes] for dtypes in of_terms], device=device)
    found = [(rank, dtypes) for rank, entry in zip(group.ranks, told, strict=True) for dtypes in entry]
    rank, dtypes = found[0]
    other, theirs = next(entry for entry in found if entry[1] != dtypes)
    raise ApplyError(
        f"the first outputs and the loss of a micro-batch are of {', '.join(dtypes)} on rank {rank} and of "
        f"{', '.join(theirs)} on rank {other}",
        fix="let model and loss compute in one dtype: torch.autocast, .to() and .float() on every rank, or on none",
    )
