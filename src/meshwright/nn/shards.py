"""Conversion between full tensors and shards, as layouts describe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import gather_from_group
from meshwright.errors import ConfigError
from meshwright.layout import ShardLayout, check_coverage

__all__: list[str] = []


def take_shard(full: Tensor, layout: ShardLayout) -> Tensor:
    """Return a copy of the part of a full tensor that a layout names.

    Args:
        full: The full tensor, of shape `layout.shape`.
        layout: Which part.

    Returns:
        A contiguous tensor of shape `layout.local_shape`, detached.

    Raises:
        ConfigError: The tensor has another shape.

    >>> take_shard(torch.arange(6), ShardLayout.cut((6,), 0, (4, 2), num_parts=2, part=1))
    tensor([2, 3, 5])
    """
    if tuple(full.shape) != layout.shape:
        raise ConfigError(f"a tensor of shape {list(full.shape)} for a layout of {list(layout.shape)}")
    block = full.detach()
    if layout.dim is not None:
        pieces = [block.narrow(layout.dim, start, stop - start) for start, stop in layout.ranges or ((0, 0),)]
        block = pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim)
        if len(pieces) > 1 and layout.flat is None:
            return block.contiguous()  # in memory of its own; channels_last ones are joined as such
    if layout.flat is not None:
        start, stop = layout.flat
        block = block.reshape(-1)[start:stop]
    return block.clone(memory_format=torch.contiguous_format)


def one_block(full: Tensor, layout: ShardLayout) -> Tensor | None:
    """Return the part of a full tensor that a layout names in the full one's memory; None where it is not one block there."""
    if layout.dim is None or layout.flat is not None or len(layout.ranges) != 1 or tuple(full.shape) != layout.shape:
        return None
    start, stop = layout.ranges[0]
    block = full.detach().narrow(layout.dim, start, stop - start)
    return block if block.is_contiguous() else None


def join_shards(shards: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Tensor:
    """Put a full tensor together from all its shards.

    Args:
        shards: One for each layout, of shape `layout.local_shape` (or flattened).
        layouts: Where they belong; together they hold every entry once.

    Returns:
        The full tensor, in memory of its own.

    Raises:
        ConfigError: A shard does not fit its layout, or the layouts leave gaps or overlap.

    >>> layouts = [ShardLayout.cut((6,), 0, (4, 2), num_parts=2, part=part) for part in range(2)]
    >>> join_shards([torch.tensor([0, 1, 4]), torch.tensor([2, 3, 5])], layouts)
    tensor([0, 1, 2, 3, 4, 5])
    """
    if len(shards) != len(layouts):
        raise ConfigError(f"{len(shards)} shards for {len(layouts)} layouts (rule: one for each)")
    check_coverage(layouts)
    full = shards[0].new_empty(layouts[0].shape)
    blocks: dict[tuple[int | None, tuple[tuple[int, int], ...]], Tensor] = {}
    for shard, layout in zip(shards, layouts, strict=True):
        if shard.numel() != layout.numel:
            raise ConfigError(f"a shard of shape {list(shard.shape)} for a layout of {list(layout.local_shape)}")
        if layout.numel:
            block = blocks.setdefault((layout.dim, layout.ranges), full.new_empty(layout.block_shape))
            start, stop = layout.flat or (0, layout.block_numel)
            block.view(-1)[start:stop] = shard.detach().reshape(-1)
    for (dim, ranges), block in blocks.items():
        for there, own in matching_parts(full, block, dim, ranges):
            there.copy_(own)
    return full


def matching_parts(
    full: Tensor, block: Tensor, dim: int | None, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of each interval of a full tensor and of a block of it, which hold the same entries; see `ShardLayout`."""
    if dim is None:
        yield full, block
        return
    position = 0
    for start, stop in ranges:
        yield full.narrow(dim, start, stop - start), block.narrow(dim, position, stop - start)
        position += stop - start


def gather_full(shard: Tensor, layouts: Sequence[ShardLayout], group: Communicator) -> Tensor:
    """Return a full tensor, on every rank, from the shards of a group: a parameter, its gradient, its moments.

    Args:
        shard: This rank's part, of its layout's `local_shape`.
        layouts: All ranks' layouts, in group order; all whole where every rank holds a copy.
        group: The ranks; all of them call this.

    Returns:
        The full tensor, detached, in memory of its own.

    Raises:
        ConfigError: The shard does not fit its layout, or the layouts leave gaps or overlap.
    """
    if all(layout.is_whole for layout in layouts):
        return shard.detach().clone().reshape(layouts[0].shape)
    sizes = [layout.numel for layout in layouts]
    joined = gather_from_group(shard.detach().reshape(-1), group, dim=0, sizes=sizes)
    return join_shards(joined.split(sizes), layouts)
