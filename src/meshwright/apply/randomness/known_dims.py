"""Dims of a draw: by its call, by the code that makes it, or by the calls of modules like its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from meshwright.apply.randomness.names import LOSS, series_of
from meshwright.apply.randomness.sample_dims import Call, SiteDims

__all__: list[str] = []


def dims_of_call(
    call: Call,
    site: int,
    shape: tuple[int, ...],
    kind: str,
    known: Mapping[Call, SiteDims],
    *,
    num_samples: int,
    shares_layers: bool,
) -> tuple[SiteDims | None, bool]:
    """Return the dims of a draw, None where they are not known; and whether they are a guess, which has to be told.

    A module that draws on a branch that values decide numbers its later draws otherwise, so that the number alone may name a
    draw inside of a cut layer with one batch, and a whole one with the next.

    Args:
        call: The call.
        site: Where the code stands that draws, as `Names.site` gives it.
        shape: What it draws.
        kind: What draws.
        known: The dims of calls that trials have made.
        num_samples: Samples of its forward [count].
        shares_layers: Whether ranks hold parts of layers.
    """
    own = known.get(call)
    fits = own is not None and own.num_dims == len(shape) and own.kind in ("", kind)
    if own is not None and fits and own.site in (0, site):
        return own, False
    at_site = {
        dims
        for (name, _), dims in known.items()
        if name == call[0] and dims.site == site and dims.num_dims == len(shape) and dims.kind == kind and not dims.loop
    }
    if len(at_site) == 1:
        return at_site.pop(), False
    if own is not None and fits:
        is_cut = own.cut is not None or own.on_stream or own.is_apart
        beside = {dims for (name, _), dims in known.items() if name == call[0] and dims.num_dims == len(shape)}
        if len(beside) == 1 and not is_cut:
            return own, False
        return dataclasses.replace(own, cut=None, on_stream=False, is_apart=False), True
    if not shape:
        return SiteDims(None), False  # one number, of all samples
    dims = dims_of_others(call, site, shape, num_samples, known, shares_layers=shares_layers)
    return dims, dims is not None and dims.follows is None  # which experts are called is decided by values


def dims_of_others(
    call: Call,
    site: int,
    shape: tuple[int, ...],
    num_samples: int,
    known: Mapping[Call, SiteDims],
    *,
    shares_layers: bool,
) -> SiteDims | None:
    """Return the dims of a call that no trial has made: those of its module's other draws, or of the model's; None: not known.

    Args:
        call: The call.
        site: Where the code stands that draws.
        shape: What it draws.
        num_samples: Samples of its forward [count].
        known: The dims of other calls.
        shares_layers: Whether ranks hold parts of layers; the module of chosen rows may be cut, and others whole.
    """
    name, number = call
    alike = {place: dims for place, dims in known.items() if dims.num_dims == len(shape) and not dims.loop}
    series = series_of(name)
    siblings = {place: dims for place, dims in alike.items() if series_of(place[0]) == series}
    for chosen in (
        {dims for (other, _), dims in alike.items() if other == name},
        {_moved(dims, name) for dims in siblings.values() if dims.site == site != 0}
        or {_moved(dims, name) for (_, n), dims in siblings.items() if n == number},
    ):
        if chosen and shares_layers and all(dims.follows is not None for dims in chosen):
            # Of siblings some may be cut, and others, which the search has not seen run, whole.
            chosen = {dims for dims in chosen if _has_rows_of(dims, shape)} or {
                dims if dims.cut is not None else dataclasses.replace(dims, is_apart=True) for dims in chosen
            }
        elif shares_layers and not any(other == name for other, _ in known):
            chosen = {_whole_where_sizes_are(dims, shape, num_samples) for dims in chosen}
            whole = {dims for dims in chosen if _is_whole(dims) and _is_as_before(dims, shape)}
            chosen = whole or {dims for dims in chosen if _fits(dims, shape, num_samples)} or chosen
        if chosen:
            return chosen.pop() if len(chosen) == 1 else None
    found = set(alike.values())
    dims = found.pop() if len(found) == 1 else None
    if dims is None or dims.dim is None or shape[dims.dim] != num_samples:
        return None
    is_plain = dims.cut is None and dims.follows is None and not (dims.on_stream or dims.is_apart or dims.is_merged)
    return dims if is_plain else None


def _has_rows_of(dims: SiteDims, shape: Sequence[int]) -> bool:
    """Tell whether rows of a tensor have the sizes of a call's, or of this rank's part of them."""
    if dims.cut is None:
        return _is_as_before(dims, shape)
    return shape[dims.cut.dim] == dims.cut.sizes[dims.cut.rank]


def _whole_where_sizes_are(dims: SiteDims, shape: Sequence[int], num_samples: int) -> SiteDims:
    """Return a sibling's dims for a layer in which no trial has drawn: it may be whole, though its siblings are cut."""
    if dims.cut is not None:
        is_whole = shape[dims.cut.dim] == sum(dims.cut.sizes) * _repeats(dims, num_samples)
    else:
        is_whole = _is_as_before(dims, shape)
    return dataclasses.replace(dims, cut=None, on_stream=False, is_apart=False) if is_whole else dims


def _fits(dims: SiteDims, shape: Sequence[int], num_samples: int) -> bool:
    """Tell whether a draw has the sizes that these dims give it, whole or cut; lengths may have changed since."""
    if dims.cut is not None:
        return shape[dims.cut.dim] == dims.cut.sizes[dims.cut.rank] * _repeats(dims, num_samples)
    return _is_as_before(dims, shape) is not (dims.on_stream or dims.is_apart)


def _is_whole(dims: SiteDims) -> bool:
    return dims.cut is None and not (dims.on_stream or dims.is_apart)


def _repeats(dims: SiteDims, num_samples: int) -> int:
    return num_samples if dims.cut is not None and dims.cut.dim == dims.dim else 1


def _is_as_before(dims: SiteDims, shape: Sequence[int]) -> bool:
    """Tell whether the dims behind the sample dim have the sizes of the first batch, with whole layers."""
    return tuple(shape[(dims.dim or 0) + 1 :]) == dims.inner


def _moved(dims: SiteDims, name: str) -> SiteDims:
    """Return a sibling's dims for a module of this name: rows follow the module as far outside of it."""
    if not dims.follows or dims.follows == LOSS:
        return dims
    return dataclasses.replace(dims, follows=".".join(name.split(".")[: dims.follows.count(".") + 1]))


def cut_in_turn(known: Mapping[Call, SiteDims]) -> dict[str, int]:
    """Return the draws of modules that one place in the code makes inside of cut layers and outside, by name [count].

    A loop over layers with one dropout for all is such a place: only the number tells which layer has run before.
    """
    parts: dict[tuple[str, int], set[object]] = {}
    for (name, _), dims in known.items():
        parts.setdefault((name, dims.site), set()).add((dims.cut, dims.on_stream, dims.is_apart))
    names = {name for (name, _), found in parts.items() if len(found) > 1}
    return {name: sum(other == name for other, _ in known) for name in names}


def of_several_calls(inside: Mapping[Call, Mapping[str, int]]) -> dict[str, frozenset[str]]:
    """Return the modules that draw inside of each module which a forward calls more than once, by its name.

    Args:
        inside: Draws of each module during a call of another, by that call [count].
    """
    found: dict[str, list[Mapping[str, int]]] = {}
    for (name, _), drawn in inside.items():
        found.setdefault(name, []).append(drawn)
    return {
        name: frozenset(inner for drawn in calls for inner in drawn) for name, calls in found.items() if len(calls) > 1
    }
