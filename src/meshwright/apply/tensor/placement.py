"""Comparison of the ranks' shards with the parameter that was cut, block by block: no rank needs the whole twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import gather_from_group
from meshwright.layout import ShardLayout, check_coverage

__all__: list[str] = []

_BLOCK = 2**21
"""Entries of a shard that are compared at a time, at least one row [count]."""


def is_in_place(whole: Tensor, shard: Tensor, layouts: Sequence[ShardLayout], group: Communicator) -> bool:
    """Tell whether the ranks' shards together equal a parameter, bit for bit, while the whole one still exists.

    Args:
        whole: The parameter, on every rank.
        shard: This rank's shard.
        layouts: All ranks' layouts, in group order, cut along a dim.
        group: The ranks; all of them call this.
    """
    if whole.is_meta or not whole.numel():
        return True
    check_coverage(layouts)
    num_rows = [layout.local_shape[0] for layout in layouts]
    widest = max(layout.numel // rows for layout, rows in zip(layouts, num_rows, strict=True) if rows)
    step = max(1, _BLOCK // max(1, widest))
    is_right = True
    for start in range(0, max(num_rows), step):  # every rank goes through all blocks: each is an exchange
        expected = [_rows(whole, layout, start, start + step) for layout in layouts]
        own = shard[start : start + step].reshape(-1)
        sizes = [rows.numel() for rows in expected]
        parts = gather_from_group(own, group, dim=0, sizes=sizes).split(sizes)
        is_right = is_right and all(_same_bits(*pair) for pair in zip(parts, expected, strict=True))
    return is_right


def _rows(whole: Tensor, layout: ShardLayout, start: int, stop: int) -> Tensor:
    """Return rows of a rank's shard as the whole parameter has them: a view where they lie together."""
    if layout.dim:
        pieces = [whole[start:stop].narrow(layout.dim, first, last - first) for first, last in layout.ranges]
        return torch.cat(pieces, layout.dim) if pieces else whole[:0]
    pieces, position = [whole[:0]], 0
    for first, last in layout.ranges:
        low, high = max(start - position, 0), min(stop - position, last - first)
        if low < high:
            pieces.append(whole[first + low : first + high])
        position += last - first
    return pieces[-1] if len(pieces) < 3 else torch.cat(pieces)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
