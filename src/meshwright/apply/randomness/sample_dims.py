"""Sample dims of drawn tensors: found from the shapes of the same call in batches of several sizes, and the places they give."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.apply.randomness.philox import Level, index_strides, merge_levels

__all__: list[str] = []

Call = tuple[str, int]
"""The module's FQN, and the number of the draw in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnPart:
    """A dim in which each rank of a layer draws a part of the full tensor."""

    dim: int
    sizes: tuple[int, ...]
    """Each rank's entries there, of one sample where the dim holds samples, too [count]."""
    rank: int


@dataclasses.dataclass(frozen=True)
class SampleBlocks:
    """Where the blocks of each sample lie in a drawn tensor: indices of its leading dims (`sample_blocks`)."""

    sizes: tuple[tuple[int, int], ...]
    """Of each of these dims, its entries without samples, and what each sample adds [count]."""
    lines: tuple[tuple[tuple[int, int, int], ...], ...]
    """Of each of a sample's blocks, for each dim: its index, by how much each sample moves it, and each one of the batch."""

    @functools.cached_property
    def laid(self) -> dict[int, Any]:
        """What `sample_blocks` has computed of it, by the samples of a forward: to hash thousands of blocks takes long."""
        return {}


@dataclasses.dataclass(frozen=True, slots=True)
class SiteDims:
    """Which dim of a drawn tensor holds the samples.

    A dim of n x k entries holds k entries of each of n samples: those of one sample next to each other, as in a batch of
    sequences that was flattened, or the samples next to each other (`is_minor`).
    """

    dim: int | None
    """The dim; None where all samples share the numbers."""
    is_minor: bool = False
    num_dims: int = 0
    is_merged: bool = False
    """Whether the dim held more than one entry of each sample when it was found."""
    loop: int = 0
    """Draws for each sample of a loop over samples, of which this is one [count]; 0: it is in none."""
    cut: DrawnPart | None = None
    on_stream: bool = False
    """Whether a layer on slices of the stream draws for its slice, which the running chain knows."""
    is_apart: bool = False
    """Whether each rank of the layer draws numbers of its own, since no cut of the full tensor was found."""
    follows: str | None = None
    """The module whose index has chosen the rows of the dim, which follow it; None: samples lie in their order."""
    follows_last: bool = False
    """Whether these were the rows that this module had chosen last, with each part of the first batch."""
    is_in_order: bool = False
    """Whether the index left no row out in the first batch, so that only rows in their order are known to be followed."""
    blocks: SampleBlocks | None = None
    """Where each sample's blocks lie, in no order of the samples; None: they lie in their order, or in that of an index."""
    is_beside: bool = dataclasses.field(default=False, compare=False)
    """Whether an index chose as many rows in some rank's first batch, not all in order, and the draw does not follow them."""
    rows: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), compare=False)
    """Of a merged dim, for each rank's first batch: the entries of a sample, and then what `sizes_given` gave [count]."""
    inner: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    """The sizes of the dims behind it in the first batch, with whole layers [count]."""
    kind: str = dataclasses.field(default="", compare=False)
    """What drew when the dim was found; another kind is another call. Empty: not known."""
    site: int = dataclasses.field(default=0, compare=False)
    """Where the code stood that drew when the dim was found, as `Names.site` gives it. 0: not known."""

    @property
    def has_merged_rows(self) -> bool:
        """Whether the dim holds several entries of each sample, in the order of the samples alone."""
        return self.is_merged and not self.loop and self.follows is None and self.blocks is None


Slicing = tuple[int, tuple[int, ...], int]
"""Of a chain of layers on slices: the dim of the stream, each rank's entries there, and this rank [count]."""


def find_dims(shapes: Sequence[tuple[int, tuple[int, ...]]], *, may_vary: bool = False) -> SiteDims | None:
    """Return the sample dim of a call; None where its shapes do not tell.

    Args:
        shapes: The number of samples, and the shape drawn then; of one call in several batches.
        may_vary: Whether other dims may depend on which samples lie together, as a length to which they are padded.
    """
    (count, shape), *others = shapes
    others = [(num, other) for num, other in others if num != count]
    if not others or any(len(other) != len(shape) for _, other in others):
        return None
    changed = {dim for dim, size in enumerate(shape) if any(other[dim] != size for _, other in others)}
    if not changed:
        return SiteDims(None, num_dims=len(shape))
    scaled = [
        dim
        for dim in changed
        if shape[dim] % count == 0 and all(shape[dim] * num == other[dim] * count for num, other in others)
    ]
    if len(scaled) != 1 or (len(changed) > 1 and not may_vary):
        return None
    dim = scaled[0]
    return SiteDims(dim, num_dims=len(shape), is_merged=shape[dim] != count)


@dataclasses.dataclass(frozen=True, slots=True)
class Located:
    """Loops over a tensor's elements, and where the first of them lies."""

    levels: tuple[Level, ...]
    first_index: int = 0
    first_sample: int = 0
    """Among the samples of the forward."""


def locate(shape: Sequence[int], dims: SiteDims, num_samples: int, slicing: Slicing | None = None) -> Located | None:
    """Return where a tensor's elements lie; None where its shape does not fit, or it holds blocks of samples.

    Args:
        shape: The tensor's.
        dims: Its sample dim.
        num_samples: Samples of the forward [count].
        slicing: The slices of the stream in which the call runs, if in any.
    """
    if dims.blocks is not None:
        return None
    cut, skipped = dims.cut, 0
    if dims.on_stream and slicing is not None:
        dim, sizes, rank = slicing
        if dim == dims.dim and sum(sizes) == num_samples:
            num_samples, skipped = sizes[rank], sum(sizes[:rank])
        else:
            cut = DrawnPart(dim, sizes, rank)
    if (
        cut is not None
        and cut.dim < len(shape)
        and num_samples
        and not (cut.dim == dims.dim and shape[cut.dim] % num_samples)
    ):
        # A call that the cut is not proven for runs whole.
        cut = None if entries_of_sample(shape, dims, num_samples, cut.dim) == sum(cut.sizes) else cut
    if dims.dim is not None and (dims.dim >= len(shape) or num_samples < 1 or shape[dims.dim] % num_samples):
        return None
    if cut is not None and (
        cut.dim >= len(shape) or cut.sizes[cut.rank] != entries_of_sample(shape, dims, num_samples, cut.dim)
    ):
        return None
    if dims.dim is not None and not (dims.is_merged or cut or shape[dims.dim] == num_samples):
        return None  # another call than the one whose dim is known
    levels: list[Level] = []
    first = 0
    strides = _strides(shape, dims, num_samples, cut)
    for dim in range(len(shape)):
        if cut is not None and cut.dim == dim:
            first += sum(cut.sizes[: cut.rank]) * strides[dim]
        inner = [Level(entries_of_sample(shape, dims, num_samples, dim), 0, strides[dim])]
        if dims.dim == dim:
            samples = Level(num_samples, 1, 0)
            inner = [*inner, samples] if dims.is_minor else [samples, *inner]
        levels += inner
    return Located(merge_levels(levels), first, skipped)


def _strides(shape: Sequence[int], dims: SiteDims, num_samples: int, cut: DrawnPart | None) -> list[int]:
    """Return by how much an entry of each dim moves the index within its sample; 0 for an unmerged dim of samples."""
    full = [entries_of_sample(shape, dims, num_samples, dim) for dim in range(len(shape))]
    if cut is not None:
        full[cut.dim] = sum(cut.sizes)
    counted = [dim for dim in range(len(shape)) if dim != dims.dim or dims.is_merged]
    strides = dict(zip(counted, index_strides([full[dim] for dim in counted]), strict=True))
    return [strides.get(dim, 0) for dim in range(len(shape))]


def locate_in_row(shape: Sequence[int], dims: SiteDims, slicing: Slicing | None = None) -> tuple[Located, int] | None:
    """Return where the elements of one row lie, and by how much the next row moves the index; None: the shape does not fit.

    Args:
        shape: The tensor's.
        dims: Its dims, of which `dim` holds the rows.
        slicing: The slices of the stream in which the call runs, if in any.
    """
    dim, cut = dims.dim, dims.cut
    if slicing is not None and dims.on_stream:
        cut = DrawnPart(*slicing)
    elif slicing is not None and cut is None and _is_slice(shape, slicing):
        return None  # a slice of the stream, and none was drawn when the dims were found
    if dim is None or dim >= len(shape) or math.prod(shape[:dim]) != 1 or (cut is not None and cut.dim <= dim):
        return None
    inner = shape[dim + 1 :]
    own = None if cut is None else DrawnPart(cut.dim - dim - 1, cut.sizes, cut.rank)
    if own is not None and (own.dim >= len(inner) or inner[own.dim] not in (own.sizes[own.rank], sum(own.sizes))):
        return None
    if own is not None and inner[own.dim] == sum(own.sizes):  # a call that the cut is not proven for runs whole
        own = None
    # As one sample with one row: the dim of the rows is the outermost of its index.
    moved = None if own is None else DrawnPart(own.dim + 1, own.sizes, own.rank)
    found = locate((1, *inner), SiteDims(None, cut=moved), 1)
    return None if found is None else (found, _strides((1, *inner), SiteDims(None), 1, moved)[0])


def _is_slice(shape: Sequence[int], slicing: Slicing) -> bool:
    """Tell whether a tensor may be this rank's slice of the stream, which has three dims."""
    dim, sizes, rank = slicing
    return len(shape) == 3 and shape[dim] == sizes[rank] != sum(sizes)


def entries_of_sample(shape: Sequence[int], dims: SiteDims, num_samples: int, dim: int) -> int:
    """Return a dim's entries of one sample."""
    return shape[dim] // num_samples if dims.dim == dim else shape[dim]


def to_rows(dims: Mapping[Call, SiteDims]) -> list[list[Any]]:
    """Return known dims as JSON values, without cuts."""
    return [
        [
            *call,
            d.kind,
            [d.dim, d.is_minor, d.num_dims, d.is_merged, d.loop],
            [d.follows, d.follows_last, d.is_in_order, d.is_beside],
            d.rows,
            d.inner,
            d.site,
            None if d.blocks is None else [d.blocks.sizes, d.blocks.lines],
        ]
        for call, d in dims.items()
    ]


def from_rows(rows: Sequence[Sequence[Any]]) -> dict[Call, SiteDims]:
    """Return what `to_rows` was given."""
    return {
        (name, number): SiteDims(
            *place,
            follows=by,
            follows_last=last,
            is_in_order=in_order,
            is_beside=beside,
            rows=tuple(map(tuple, known)),
            inner=tuple(inner),
            kind=kind,
            site=site,
            blocks=None if blocks is None else _blocks_of(*blocks),
        )
        for name, number, kind, place, (by, last, in_order, beside), known, inner, site, blocks in rows
    }


def _blocks_of(sizes: Sequence[Sequence[int]], lines: Sequence[Sequence[Sequence[int]]]) -> SampleBlocks:
    """Return blocks of JSON values."""
    return SampleBlocks(
        tuple((base, each) for base, each in sizes),
        tuple(tuple((base, own, each) for base, own, each in block) for block in lines),
    )


def of_all_ranks(found: Sequence[Mapping[Call, SiteDims]]) -> dict[Call, SiteDims]:
    """Return the dims on which ranks agree that have found any."""
    merged: dict[Call, SiteDims | None] = {}
    for dims in found:
        for call, own in dims.items():
            before = merged.setdefault(call, own)
            merged[call] = None if before is None else _of_both(before, own)
    return {call: own for call, own in merged.items() if own is not None}


def _of_both(one: SiteDims, other: SiteDims) -> SiteDims | None:
    """Return what two ranks have found; None where they do not agree.

    An index may have left out rows of one rank's share alone, and more of it is known there.
    """
    alike = dataclasses.replace(other, is_in_order=one.is_in_order, follows_last=one.follows_last)
    if one != alike:
        return None
    return dataclasses.replace(
        other,
        follows_last=one.follows_last and other.follows_last,
        is_in_order=one.is_in_order and other.is_in_order,
        is_beside=one.is_beside or other.is_beside,
        rows=tuple(dict.fromkeys((*one.rows, *other.rows))),
    )
