"""Slices of merged rows that begin or end inside of a sample, as a tensor-parallel layer takes them of frames; and blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright._torch_dispatch import draws_untouched
from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.philox import ElementPlace, Level, RowPlaces, index_strides, merge_levels
from meshwright.apply.randomness.sample_blocks import place_blocks
from meshwright.apply.randomness.sample_dims import SiteDims, Slicing

__all__: list[str] = []


def place_pieces(
    key: int, shape: tuple[int, ...], dims: SiteDims, forward: ForwardDraws, slicing: Slicing | None
) -> ElementPlace | None:
    """Return the places of a tensor that holds pieces of samples, as `dims` say; None where it is another call.

    Args:
        key: Of the call.
        shape: The tensor's.
        dims: Its sample dim, or the blocks of samples.
        forward: The forward that is running.
        slicing: The slices of the stream in which the call runs, if in any.
    """
    if dims.blocks is None:
        return _place_slice(key, shape, dims, forward, slicing)
    with torch.no_grad(), draws_untouched():
        return place_blocks(
            *(key, shape, dims, dims.blocks), first=forward.first, num_samples=forward.num_samples, slicing=slicing
        )


def _place_slice(
    key: int, shape: Sequence[int], dims: SiteDims, forward: ForwardDraws, slicing: Slicing | None
) -> ElementPlace | None:
    """Return the places of a slice of merged rows that begins or ends inside of a sample; None where it is another call."""
    num_samples = forward.num_samples
    if slicing is None or not (dims.on_stream and dims.is_merged) or dims.dim != slicing[0] or num_samples < 1:
        return None
    dim, sizes, rank = slicing
    each, rest = divmod(sum(sizes), num_samples)
    if rest or dim >= len(shape) or shape[dim] != sizes[rank] or math.prod(shape[:dim]) != 1:
        return None
    strides = index_strides([each, *shape[dim + 1 :]])
    levels = merge_levels([Level(size, 0, step) for size, step in zip(shape[dim + 1 :], strides[1:], strict=True)])
    with torch.no_grad(), draws_untouched():
        rows = torch.arange(sizes[rank]) + sum(sizes[:rank])
        samples, own = (rows % num_samples, rows // num_samples) if dims.is_minor else (rows // each, rows % each)
        places = RowPlaces(samples + forward.first, own * strides[0])
    return ElementPlace(key, levels, rows=places)
