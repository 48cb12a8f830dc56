"""Samples that trials of a share take: enough of them to show what a batch does that one sample does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwright.describe.batches import BatchSplitter
from meshwright.run.losses.trial_parts import join_samples, second_sample

__all__: list[str] = []

_FEW = 2


def enough_samples(parts: Sequence[Any], splitter: BatchSplitter) -> Any:
    """Return at least two samples of this rank's share, three where micro-batches of two have them, or None.

    Two do not show what is made for an odd number of samples.
    """
    count = splitter.count(parts[0]) if parts else 0
    if count == _FEW and len(parts) > 1 and splitter.splits_by_row and has_rows_alone(parts[0], count):
        joined = join_samples([parts[0], *splitter.cut(parts[1], splitter.count(parts[1]))[:1]])
        return parts[0] if joined is None else joined
    if count >= _FEW:
        return parts[0]
    if not count or not splitter.splits_by_row:
        return None
    return join_samples(parts[:3] if len(parts) > 1 else [parts[0], second_sample(parts[0])])


def has_rows_alone(batch: Any, count: int) -> bool:
    """Tell whether a batch is nothing but tensors with a row for each sample; of anything else one part alone is known."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and len(batch) == count
    if isinstance(batch, Mapping):
        return all(has_rows_alone(value, count) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return all(has_rows_alone(value, count) for value in batch)
    return batch is None
