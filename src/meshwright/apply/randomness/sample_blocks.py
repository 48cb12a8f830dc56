"""Blocks of a drawn tensor, each of one sample, where no dim holds the samples in their order: where they lie, and their places.

Queries above their documents in one tensor, or tokens that code takes from its first rows, are such. A block is what lies at one
index of the leading dims. It is found from what each block has influence on, in batches of several sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.apply.randomness.philox import INDEX_BITS, NO_SAMPLE, ElementPlace, RowPlaces
from meshwright.apply.randomness.sample_dims import DrawnPart, SampleBlocks, SiteDims, Slicing, locate_in_row

__all__: list[str] = []

NO_OWNER = -1
"""The sample of a block that none is influenced by."""
_MOST = 1 << 16
"""Blocks of a sample [count]."""
_MOST_SIZES = 64
"""Numbers of samples whose blocks are kept [count]."""


def find_blocks(seen: Sequence[tuple[int, Tensor]]) -> SampleBlocks | None:
    """Return where the blocks of each sample lie; None where they follow no line.

    Args:
        seen: The samples of a batch, and the sample of each block that it drew, `NO_OWNER` for none; of batches of several sizes.
    """
    (most, owners), (least, others) = max(seen, key=lambda pair: pair[0]), min(seen, key=lambda pair: pair[0])
    if most == least:
        return None
    sizes = [_line((least, small), (most, large)) for small, large in zip(others.shape, owners.shape, strict=True)]
    places = {count: _places_in(own, count) for count, own in seen}
    whole, part = places[most], places[least]
    if whole is None or part is None or whole.shape[1:] != part.shape[1:] or not 0 < whole.shape[1] <= _MOST:
        return None
    moved = whole[0] - part[0]
    if None in sizes or bool((moved % (most - least)).any()):
        return None
    per_batch, per_sample = moved // (most - least), whole[1] - whole[0]
    lines = torch.stack([whole[0] - most * per_batch, per_sample, per_batch], dim=-1)
    found = SampleBlocks(
        tuple(size for size in sizes if size is not None),
        tuple(tuple((int(base), int(own), int(all_)) for base, own, all_ in block) for block in lines.tolist()),
    )
    for count, own in seen:
        laid = _owners(found, count)
        if laid is None or laid[0] != tuple(own.shape) or not torch.equal(laid[1].view(own.shape), own.cpu()):
            return None
    return found


def place_blocks(
    key: int,
    shape: tuple[int, ...],
    dims: SiteDims,
    blocks: SampleBlocks,
    *,
    first: int,
    num_samples: int,
    slicing: Slicing | None,
) -> ElementPlace | None:
    """Return the places of a tensor's elements; None where its shape does not fit.

    The index of a block is its number among those of its sample.

    Args:
        key: Of the call.
        shape: The tensor's.
        dims: Of the call.
        blocks: Where each sample's blocks lie.
        first: The place of the forward's first sample.
        num_samples: Its samples [count].
        slicing: The slices of the stream in which the call runs, if in any.
    """
    depth = len(blocks.sizes)
    laid = _owners(blocks, num_samples) if num_samples > 0 else None
    if laid is None or (depth > 1 and slicing is not None):
        return None
    sizes, owners, numbers = laid
    total, cut, on_stream = len(owners), dims.cut, dims.on_stream
    if on_stream and slicing is not None and slicing[0] == 0 and sum(slicing[1]) == total:  # a slice of the blocks
        _, drawn, rank = slicing
        own = slice(sum(drawn[:rank]), sum(drawn[: rank + 1]))
        sizes, owners, numbers = (drawn[rank],), owners[own], numbers[own]
        on_stream, slicing = False, None
    if shape[:depth] != sizes or (cut is not None and cut.dim < depth):
        return None
    cut = None if cut is None else DrawnPart(cut.dim - depth + 1, cut.sizes, cut.rank)
    found = locate_in_row((len(owners), *shape[depth:]), SiteDims(0, cut=cut, on_stream=on_stream), slicing)
    if found is None or total * found[1] >> INDEX_BITS:
        return None
    within, stride = found
    samples = torch.where(owners == NO_OWNER, NO_SAMPLE, owners + first)
    return ElementPlace(key, within.levels, 0, within.first_index, RowPlaces(samples, numbers * stride))


def unseen_blocks(blocks: SampleBlocks, num_samples: int) -> Tensor | None:
    """Return which blocks are of no sample, a mask of the leading dims; None where there are none, or blocks do not fit."""
    laid = _owners(blocks, num_samples)
    if laid is None or not bool((laid[1] == NO_OWNER).any()):
        return None
    return (laid[1] == NO_OWNER).view(laid[0])


Laid = tuple[tuple[int, ...], Tensor, Tensor] | None
"""The leading sizes, each block's sample, and its number among that sample's; None where blocks do not fit."""


def _owners(blocks: SampleBlocks, num_samples: int) -> Laid:
    if num_samples not in blocks.laid:
        if len(blocks.laid) >= _MOST_SIZES:
            blocks.laid.clear()
        blocks.laid[num_samples] = _lay(blocks, num_samples)
    return blocks.laid[num_samples]


def _lay(blocks: SampleBlocks, num_samples: int) -> Laid:
    sizes = tuple(base + num_samples * each for base, each in blocks.sizes)
    lines = torch.tensor(blocks.lines, dtype=torch.int64)  # (blocks of a sample, dims, 3)
    samples = torch.arange(num_samples)[:, None, None]
    places = lines[..., 0] + samples * lines[..., 1] + num_samples * lines[..., 2]
    if min(sizes, default=0) < 1 or bool(((places < 0) | (places >= torch.tensor(sizes))).any()):
        return None
    flat = torch.zeros(places.shape[:2], dtype=torch.int64)
    for dim, size in enumerate(sizes):
        flat = flat * size + places[..., dim]
    if len(flat.unique()) < flat.numel():
        return None
    total = int(torch.tensor(sizes).prod())
    owners, numbers = torch.full((total,), NO_OWNER), torch.arange(total)
    owners[flat] = torch.arange(num_samples)[:, None].expand_as(flat)
    numbers[flat] = torch.arange(flat.shape[1]).expand_as(flat)
    return sizes, owners, numbers


def _places_in(owners: Tensor, num_samples: int) -> Tensor | None:
    """Return the indices of each sample's blocks (samples, blocks, dims), in their order; None: not as many of each."""
    places = [(owners.cpu() == sample).nonzero() for sample in range(num_samples)]
    return torch.stack(places) if len({len(own) for own in places}) == 1 else None


def _line(small: tuple[int, int], large: tuple[int, int]) -> tuple[int, int] | None:
    """Return a size in a batch of no samples, and by how much each sample adds to it; None: it is no whole number."""
    each, rest = divmod(large[1] - small[1], large[0] - small[0])
    return None if rest else (small[1] - each * small[0], each)
