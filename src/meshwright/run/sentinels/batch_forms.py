"""Forms of the batches that ranks step on: a key, a flag or a type that one share has and another has not, told once.

One device gets all shares as one batch, with one set of keys. A script may know better (shares of several tasks), so it is told.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from meshwright.comm.communicator import Communicator
from meshwright.run.sentinels.digest import digest_text

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_MAX_SHOWN = 160


class FormWatch:
    """The form of each rank's last batch."""

    def __init__(self) -> None:
        self._form: str | None = None
        self._is_on = True

    def digest(self, batch: Any) -> int:
        """Return a digest of a batch's form; of that before for a rank whose share is empty."""
        if not self._is_on:
            return 0
        self._form = form_of(batch) if batch is not None else self._form
        return digest_text(self._form or "")

    def explain(self, group: Communicator, device: torch.device) -> list[str]:
        """Return what is told where forms differ; every rank calls it."""
        told = group.all_gather_json(self._form, device=device)
        known = [(rank, form) for rank, form in zip(group.ranks, told, strict=True) if form is not None]
        if self._form is None and known:
            self._form = known[0][1]  # a rank that has never had a sample would be asked in each step
        odd = next(((rank, form) for rank, form in known if form != known[0][1]), None)
        if odd is None:
            return []
        self._is_on = False
        text = (
            f"batches have other keys, flags or types on ranks {known[0][0]} and {odd[0]}: {known[0][1][:_MAX_SHOWN]} and "
            f"{odd[1][:_MAX_SHOWN]}. One device gets one batch: where results depend on them, give every share the same"
        )
        if group.group_rank == 0:
            _LOG.warning("%s", text)
        return [text]


def form_of(batch: Any) -> str:
    """Return the keys, types, dtypes, numbers of dims and flags of a batch as text; numbers of samples do not count.

    >>> form_of({"x": torch.zeros(3, 2), "is_long": True})
    '{is_long: True, x: float32, 2 dims}'
    """
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}, {batch.dim()} dims"
    if isinstance(batch, Mapping):
        rows = sorted((str(key), form_of(value)) for key, value in batch.items())
        return f"{{{', '.join(f'{key}: {form}' for key, form in rows)}}}"
    if isinstance(batch, tuple):
        return f"({', '.join(map(form_of, batch))})"
    if isinstance(batch, list):  # one for each sample, perhaps
        return f"[{', '.join(sorted(set(map(form_of, batch))))}]"
    return repr(batch) if isinstance(batch, bool) or batch is None else type(batch).__name__
