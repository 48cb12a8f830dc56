"""Places of draws on rows that an index has chosen, and draws that may be on such rows unseen."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable

from torch import Tensor

from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.names import LOSS, Names
from meshwright.apply.randomness.philox import ElementPlace, key_of
from meshwright.apply.randomness.sample_dims import Call, SiteDims, Slicing, locate_in_row

__all__: list[str] = []

_MOST_GIVEN = 16
"""Tensors that are looked at [count]."""


def place_in_rows(
    call: Call,
    forward: ForwardDraws,
    shape: tuple[int, ...],
    dims: SiteDims,
    *,
    names: Names,
    text: str,
    slicing: Slicing | None,
) -> ElementPlace | None:
    """Return the places of rows that an index has chosen; None where they are not known.

    Args:
        call: The call that draws.
        forward: The forward that runs.
        shape: What is drawn.
        dims: Of the call.
        names: The model's modules.
        text: What the step's numbers depend on.
        slicing: The slices of the stream in which the call runs, if in any.
    """
    if dims.dim is None or dims.is_apart:
        return None
    within = locate_in_row(shape, dims, slicing)
    rows = within and forward.rows.place(
        call,
        dims,
        shape[dims.dim],
        given=list(names.given()),
        first=forward.first,
        num_samples=forward.num_samples,
        row_stride=within[1],
    )
    if within is None or rows is None:
        return None
    return ElementPlace(key_of(f"{text}/{call[0]}/rows"), within[0].levels, 0, within[0].first_index, rows)


def is_on_rows(forward: ForwardDraws, shape: tuple[int, ...], dims: SiteDims, names: Names) -> bool:
    """Tell whether a draw may be on rows that an index has chosen, where it chose none, or all in order, in the first batch.

    Samples that code sorts by a value are such rows, until it has put them back.

    Args:
        forward: The forward that runs.
        shape: What is drawn.
        dims: Of the call, whose samples are taken to lie in their order.
        names: The model's modules.
    """
    if dims.dim is None or dims.loop or dims.is_beside or dims.dim >= len(shape):
        return False
    if not dims.is_merged:
        return forward.rows.has_moved(forward.num_samples, dims.dim)
    choosing = forward.rows.out_of_order(shape[dims.dim])
    return bool(choosing) and not choosing.isdisjoint({*names.running(), LOSS})


def has_other_rows(forward: ForwardDraws, shape: tuple[int, ...], dims: SiteDims, names: Names) -> bool:
    """Tell whether a sample has other rows than in the first batch, and no size of what the modules were given is others as well.

    Sequences without padding, which code has put together by slices, have as many rows as values say.

    Args:
        forward: The forward that runs.
        shape: What is drawn.
        dims: Of the call, whose samples are taken to lie in their order.
        names: The model's modules.
    """
    is_whole = dims.cut is None and not dims.on_stream
    if dims.dim is None or not (dims.is_merged and dims.rows and is_whole) or dims.loop or dims.dim >= len(shape):
        return False
    each = shape[dims.dim] // max(1, forward.num_samples)
    if any(each == known for known, *_ in dims.rows):
        return False
    now = sizes_given(names.given(), forward.num_samples)
    return not any(
        before and size and each * before == known * size
        for known, *sizes in dims.rows
        for before, size in zip(sizes, now, strict=False)
    )


def sizes_given(given: Iterable[Tensor], num_samples: int) -> tuple[int, ...]:
    """Return how many rows of a sample tensors may be flattened to: 0 where a tensor has no dim of samples.

    Args:
        given: What the modules that run were called with.
        num_samples: Of the forward [count].
    """
    found: list[int] = []
    for tensor in itertools.islice(given, _MOST_GIVEN):
        shape = list(tensor.shape)
        if len(shape) < 2:
            continue
        fits = num_samples in shape[:2]
        if fits:
            shape.remove(num_samples)
        found += itertools.accumulate(shape[: tensor.dim() - 1], operator.mul) if fits else [0] * (len(shape) - 1)
    return tuple(map(int, found))
