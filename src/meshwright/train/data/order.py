"""Order of samples: the samples of each batch as pure functions of a seed, an epoch and a position."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.layout import even_ranges

__all__: list[str] = []


def mix(*numbers: int) -> int:
    """Return a 63-bit seed that depends on all numbers and on their order (splitmix64 over them).

    Seeds made by adding would repeat: seed 0 in epoch 1 would be seed 1 in epoch 0.
    """
    state = 0
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def epoch_order(length: int, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
    """Return the sample indices of one epoch in order, [length]; no global random state is read or moved."""
    if not shuffle:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(mix(seed, epoch)))


def num_batches(length: int, global_batch_size: int, *, drop_last: bool) -> int:
    """Return the global batches of one epoch [count]."""
    return length // global_batch_size if drop_last else -(-length // global_batch_size)


def rank_shares(
    order: torch.Tensor, start: int, global_batch_size: int, part: int, parts: int, *, drop_last: bool
) -> Iterator[tuple[int, tuple[int, list[int]]]]:
    """Yield, for each global batch from sample `start` on, its size and this rank's share.

    A share is its begin in the order, and its sample indices, perhaps none.
    """
    for begin in range(start, order.numel(), global_batch_size):
        batch = order[begin : begin + global_batch_size]
        if drop_last and batch.numel() < global_batch_size:
            return
        low, high = even_ranges(batch.numel(), parts)[part]
        yield batch.numel(), (begin + low, batch[low:high].tolist())
