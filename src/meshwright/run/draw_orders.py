"""Orders of samples among draws, and rows that draws follow: what to try where the dims that are supposed give other outputs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright.apply.randomness.chosen_rows import row_dims
from meshwright.apply.randomness.forward_draws import DrawNote
from meshwright.apply.randomness.names import LOSS, series_of
from meshwright.apply.randomness.sample_dims import Call, SiteDims

__all__: list[str] = []

_MOST_TURNED = 6
"""Calls in which the order of samples is tried one by one; more are tried together [count]."""


def turned(dims: Mapping[Call, SiteDims], calls: Sequence[Call]) -> dict[Call, SiteDims]:
    """Return sample dims with the samples of these calls in the other order; of loops, any kind of draw may stand in a turn."""
    return {
        call: dataclasses.replace(own, is_minor=not own.is_minor, kind="" if own.loop else own.kind)
        if call in calls
        else own
        for call, own in dims.items()
    }


def few(groups: list[list[Call]]) -> list[list[Call]]:
    """Return groups of calls to try one after the other, or all together where they are many."""
    return groups if len(groups) <= _MOST_TURNED else [[call for group in groups for call in group]]


def of_unknown_order(
    dims: Mapping[Call, SiteDims], merged: Sequence[Call], notes: Mapping[Call, DrawNote]
) -> list[list[Call]]:
    """Return the calls that may hold their samples in two orders, each by itself; those that follow one index together.

    Args:
        dims: Their sample dims.
        merged: Calls whose samples lie beside other entries.
        notes: What the whole batch drew with these dims; values may have chosen other rows before.
    """
    groups: dict[Call | str, list[Call]] = {}
    for call in merged:
        own, note = dims[call], notes.get(call)
        if own.is_minor or note is None or not note.is_in_order:
            groups.setdefault(call if own.follows is None else own.follows, []).append(call)
    return list(groups.values())


def orders(merged: Sequence[Call], loops: Sequence[Call] = ()) -> list[list[Call]]:
    """Return which calls to turn, in the order of the attempts: merged ones, those of the model, of the loss, loops, and all.

    Args:
        merged: Calls whose samples lie beside other entries.
        loops: Those of loops over samples with several draws for each.
    """
    of_loss = [call for call in merged if call[0] == LOSS]
    of_model = [call for call in merged if call[0] != LOSS]
    orders = [[*merged], *([of_model, of_loss] if of_loss and of_model else []), [*loops], [*merged, *loops]]
    return [order for place, order in enumerate(orders) if order and order not in orders[:place]]


def following(
    dims: Mapping[Call, SiteDims], whole: Mapping[Call, DrawNote], pieces: Sequence[Mapping[Call, DrawNote]]
) -> Iterator[dict[Call, SiteDims]]:
    """Yield sample dims in which draws on rows that an index has chosen follow these, in the order of the attempts.

    Where all that may follow do, and where those alone do of which no dim is known.

    Args:
        dims: Known sample dims.
        whole: What the whole batch drew.
        pieces: What each of its parts drew.
    """
    found: dict[Call, SiteDims] = {}
    last = _places_of_last([whole, *pieces])
    for call, note in whole.items():
        notes = [note, *(piece[call] for piece in pieces if call in piece)]
        places = [set(_dims_of_rows(one)) for one in notes]
        dim = min(set.intersection(*places), default=None)
        rows = [one.chosen for one in notes if one.chosen is not None]
        if dim is not None and len(rows) == len(notes) and len({own.name for own in rows}) == 1:
            found[call] = SiteDims(
                dim,
                num_dims=len(note.shape),
                is_merged=True,
                follows=rows[0].name,
                follows_last=(series_of(call[0]), note.site) in last,
                inner=note.shape[dim + 1 :],
                kind=note.kind,
                site=note.site,
            )
    unknown = {call: own for call, own in found.items() if call not in dims}
    for tried in [found, *([unknown] if unknown and unknown != found else [])] if found else []:
        yield {**dims, **tried}


def _places_of_last(notes: Iterable[Mapping[Call, DrawNote]]) -> set[tuple[str, int]]:
    """Return the places in the code, by modules of one kind, that draw for the last rows chosen, in all of several forwards.

    Of rows that are all chosen before any of them draw, those of the last draw are such rows, and those of the others not.
    """
    seen: dict[tuple[str, int], set[bool]] = {}
    for own in notes:
        for (name, _), note in own.items():
            if note.chosen is not None and note.chosen.is_last is not None:
                seen.setdefault((series_of(name), note.site), set()).add(note.chosen.is_last)
    return {place for place, found in seen.items() if found == {True}}


def in_order(
    dims: Mapping[Call, SiteDims], chosen: Mapping[Call, DrawNote], pieces: Sequence[Mapping[Call, DrawNote]]
) -> dict[Call, SiteDims]:
    """Return sample dims in which draws follow rows of which an index has left none out, so far.

    Args:
        dims: Known sample dims, which the first batch has proven.
        chosen: What the whole batch drew on such rows, merged with others of their samples.
        pieces: What each of its parts drew.
    """
    tried = next(following(dims, chosen, pieces), dict(dims))
    return {
        call: dataclasses.replace(own, is_minor=dims[call].is_minor, is_in_order=True) if call in chosen else own
        for call, own in tried.items()
    }


def beside(dims: Mapping[Call, SiteDims], chosen: Mapping[Call, DrawNote]) -> dict[Call, SiteDims]:
    """Return sample dims in which draws that do not follow the rows of an index are known for it, where it has an order."""
    return {
        call: dataclasses.replace(own, is_beside=True)
        if own.follows is None and call in chosen and not chose_all_in_order(chosen[call])
        else own
        for call, own in dims.items()
    }


def chose_all_in_order(note: DrawNote) -> bool:
    """Tell whether the rows of a draw are all that an index chose among, in their order."""
    return note.chosen is not None and note.chosen.is_in_order


def _dims_of_rows(note: DrawNote) -> list[int]:
    return [dim for dim in row_dims(note.shape) if note.chosen is not None and note.shape[dim] == note.chosen.num_rows]


def draws_inside(notes: Mapping[Call, DrawNote]) -> dict[Call, Counter[str]]:
    """Return the draws of each module during a call of another or of itself, by that call."""
    found: dict[Call, Counter[str]] = {}
    for (name, _), note in notes.items():
        for call in set(note.within):
            found.setdefault(call, Counter())[name] += 1
    return found
