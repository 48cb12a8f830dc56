"""Parts of a drawn tensor that the ranks of a cut layer draw: found from the shapes of calls made whole and cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.apply.randomness.forward_draws import DrawNote
from meshwright.apply.randomness.sample_dims import Call, DrawnPart, SiteDims, Slicing, entries_of_sample

__all__: list[str] = []


def find_cuts(
    dims: Mapping[Call, SiteDims],
    whole: Mapping[Call, DrawNote],
    notes: Mapping[Call, DrawNote],
    shapes: Sequence[Mapping[Call, Sequence[int]]],
    rank: int,
    *,
    num_samples: int,
) -> dict[Call, SiteDims]:
    """Return the dims, with their cuts, of the calls that this rank has made both whole and cut.

    Args:
        dims: As one device has them.
        whole: What this rank drew of its share with whole layers.
        notes: The same with cut ones.
        shapes: What the ranks that share the layers drew then, in their order.
        rank: This rank's place among them.
        num_samples: Of the share [count].
    """
    found = {}
    for call in dims.keys() & whole.keys() & notes.keys():
        own, slicing = [shape.get(call) for shape in shapes], notes[call].slicing
        known = dataclasses.replace(
            dims[call], site=notes[call].site
        )  # other ranks' batches may number draws otherwise
        found[call] = find_cut(known, whole[call].shape, own, rank, num_samples=num_samples, slicing=slicing)
    return found


def find_cut(
    dims: SiteDims,
    whole: Sequence[int],
    shapes: Sequence[Sequence[int] | None],
    rank: int,
    *,
    num_samples: int,
    slicing: Slicing | None,
) -> SiteDims:
    """Return the dims of a call with the cut that ranks which share its layer make.

    Args:
        dims: As one device has them.
        whole: The shape that one device draws.
        shapes: The shapes that these ranks draw, in their order; None where a rank does not, as one without a head.
        rank: This rank's place among them.
        num_samples: Samples of that forward [count].
        slicing: The slices of the stream in which the call ran, if in any.
    """
    apart = dataclasses.replace(dims, is_apart=True)
    given = [shape for shape in shapes if shape is not None]
    if len(given) == len(shapes) and len(set(map(tuple, given))) == 1:
        apart = dims  # all draw the same tensor, of another length than before: numbers decide it
    if any(len(shape) != len(whole) for shape in given):
        return apart
    # How many rows an index chooses depends on numbers that other calls draw, whose cuts are not known yet.
    rows = None if dims.follows is None or len({shape[dims.dim or 0] for shape in given}) > 1 else dims.dim
    differing = {dim for shape in given for dim in range(len(whole)) if shape[dim] != whole[dim] and dim != rows}
    if not differing:
        return dims
    if len(differing) > 1:
        return apart
    dim = differing.pop()
    drawn = tuple(0 if shape is None else shape[dim] for shape in shapes)
    # The stream has three dims. As many heads as tokens, between the regions' columns and rows, are parts of four.
    # Slices of the samples themselves are such in any tensor, as of images.
    is_of_stream = len(whole) == 3 or (dim == dims.dim and not dims.is_merged)
    if slicing is not None and is_of_stream and slicing[0] == dim and drawn == slicing[1]:
        return dataclasses.replace(dims, on_stream=True)
    if any(dims.dim == dim and shape[dim] % num_samples for shape in given):
        return apart
    sizes = tuple(0 if shape is None else entries_of_sample(shape, dims, num_samples, dim) for shape in shapes)
    if sum(sizes) != entries_of_sample(whole, dims, num_samples, dim):
        return apart
    return dataclasses.replace(dims, cut=DrawnPart(dim, sizes, rank))


def cuts_to_rows(found: Mapping[Call, SiteDims]) -> list[list[Any]]:
    """Return the cuts that `find_cuts` has found as JSON values."""
    return [
        [*call, None if own.cut is None else [own.cut.dim, own.cut.sizes], own.on_stream, own.is_apart, own.site]
        for call, own in found.items()
    ]


def take_cuts(
    dims: Mapping[Call, SiteDims], found: Mapping[Call, SiteDims], told: Iterable[Sequence[Any]], rank: int
) -> dict[Call, SiteDims]:
    """Return the dims of all calls whose cut is known to any rank; those of the others are left to calls like them.

    An expert without tokens, or a layer that was dropped, shows no cut to the ranks that share it.

    Args:
        dims: As one device has them.
        found: Those with the cuts that this rank has found.
        told: The cuts that all ranks have found, as `cuts_to_rows` gives them.
        rank: This rank's place among those that share its layers.
    """
    others: dict[Call, set[tuple[Any, ...]]] = {}
    for name, number, cut, on_stream, is_apart, site in told:
        known = (None if cut is None else (cut[0], tuple(cut[1])), on_stream, is_apart, site)
        others.setdefault((name, number), set()).add(known)
    taken = dict(found)
    for call in dims.keys() & others.keys() - found.keys():
        clear = {known for known in others[call] if not known[2]} or others[call]
        if len(clear) == 1:
            cut, on_stream, is_apart, site = clear.pop()
            part = None if cut is None else DrawnPart(cut[0], cut[1], rank)
            taken[call] = dataclasses.replace(dims[call], cut=part, on_stream=on_stream, is_apart=is_apart, site=site)
    return taken
