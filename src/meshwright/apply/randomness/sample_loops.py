"""Loops over samples: draws that code makes for one sample after the other, each known by its sample and its place in the turn.

A loop draws as many times for each sample, so that a module's draws are a fixed number of times the samples, in the whole batch
and in each part of it. Draw 7 of a loop with three draws a turn is then the second of sample 2. Where the samples are the inner
loop (`is_minor`), three times four samples say, it is the second draw of sample 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from meshwright.apply.randomness.sample_dims import Call, SiteDims, find_dims

__all__: list[str] = []


def find_loops(runs: Sequence[tuple[int, Mapping[Call, tuple[int, ...]]]]) -> dict[str, int]:
    """Return how many draws a module makes for each sample, by the names of modules that draw in a loop over samples.

    Args:
        runs: Samples [count] and shapes drawn, by call; of the whole batch, then of its parts.
    """
    made = [(num, shapes, Counter(name for name, _ in shapes)) for num, shapes in runs]
    (num_samples, _, numbers), *parts = made
    found: dict[str, int] = {}
    for name, number in numbers.items():
        each, rest = divmod(number, num_samples)
        is_in_turn = not rest and any(num != num_samples for num, _, _ in parts)
        if is_in_turn and all(own[name] == each * num for num, _, own in parts):
            turns = [[(num, shapes[name, place]) for num, shapes, _ in made] for place in range(each)]
            if all(_is_of_one_sample(turn) for turn in turns):
                found[name] = each
    return found


def _is_of_one_sample(shapes: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
    """Tell whether a draw's shape does not grow with the samples; it may differ with the sample that it is for."""
    dims = find_dims(shapes)
    return dims.dim is None if dims is not None else len({len(shape) for _, shape in shapes}) == 1


def note_loops(
    dims: dict[Call, SiteDims], drawn: Mapping[Call, tuple[tuple[int, ...], str]], loops: Mapping[str, int]
) -> None:
    """Make of the calls of loops those of one turn.

    Args:
        dims: Known sample dims, by call; changed.
        drawn: Shape and kind of what the whole batch drew.
        loops: Draws for each sample, by module.
    """
    for call, (shape, kind) in drawn.items():
        each = loops.get(call[0], 0)
        if call[1] < each:
            dims[call] = SiteDims(None, num_dims=len(shape), loop=each, kind=kind)
        elif each:
            dims.pop(call, None)


def in_turn(call: Call, dims: Mapping[Call, SiteDims], num_samples: int) -> tuple[Call, int | None]:
    """Return the call's place in its turn, and the sample of that turn; the call itself and None where it is in no loop."""
    first = dims.get((call[0], 0))
    if first is None or not first.loop or call[1] >= first.loop * num_samples:
        return call, None
    if first.is_minor:
        place, sample = divmod(call[1], num_samples)
    else:
        sample, place = divmod(call[1], first.loop)
    return (call[0], place), sample


def loops_of(dims: Mapping[Call, SiteDims]) -> dict[str, int]:
    """Return the draws for each sample, by the names of modules whose loops are known."""
    return {name: own.loop for (name, number), own in dims.items() if own.loop and not number}
