"""Places of draws on rows that an index has chosen, and draws that may be on such rows unseen."""

from __future__ import annotations

from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.names import LOSS, Names
from meshwright.apply.randomness.philox import ElementPlace, key_of
from meshwright.apply.randomness.sample_dims import Call, SiteDims, locate_in_row

__all__: list[str] = []


def place_in_rows(
    call: Call, forward: ForwardDraws, shape: tuple[int, ...], dims: SiteDims, *, names: Names, text: str
) -> ElementPlace | None:
    """Return the places of rows that an index has chosen; None where they are not known.

    Args:
        call: The call that draws.
        forward: The forward that runs.
        shape: What is drawn.
        dims: Of the call.
        names: The model's modules.
        text: What the step's numbers depend on.
    """
    if dims.dim is None or dims.is_apart:
        return None
    within = locate_in_row(shape, dims)
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
    (found, _), (places, each) = within, rows
    return ElementPlace(key_of(f"{text}/{call[0]}/rows of {each}"), found.levels, 0, found.first_index, places)


def is_on_rows(forward: ForwardDraws, shape: tuple[int, ...], dims: SiteDims, names: Names) -> bool:
    """Tell whether a draw may be on rows that an index has chosen, where it chose none, or all in order, in the first batch.

    Args:
        forward: The forward that runs.
        shape: What is drawn.
        dims: Of the call, whose samples are taken to lie in their order.
        names: The model's modules.
    """
    if dims.dim is None or not dims.is_merged or dims.loop or dims.is_beside or dims.dim >= len(shape):
        return False
    choosing = forward.rows.out_of_order(shape[dims.dim])
    return bool(choosing) and not choosing.isdisjoint({*names.running(), LOSS})
