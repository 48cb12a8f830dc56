"""Tensors in a row, cut where the slices of ranks end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__: list[str] = []


def cut_at(tensors: Sequence[torch.Tensor], ends: Sequence[int]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (slice, offset in that slice, part) for concatenated tensors cut into slices at `ends`."""
    owner, begin, at = 0, 0, 0  # the slice that contains `at`, its begin, and the position in the concatenated tensors
    for tensor in tensors:
        done = 0
        while done < tensor.numel():
            while at >= ends[owner]:
                begin, owner = ends[owner], owner + 1
            count = min(tensor.numel() - done, ends[owner] - at)
            yield owner, at - begin, tensor[done : done + count]
            done, at = done + count, at + count
