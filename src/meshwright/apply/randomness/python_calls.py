"""Calls of Python's and NumPy's global generators in a forward, each seeded by its place in the code and its sample.

A loop over samples that draws by these generators (masks of SpecAugment) takes the numbers that come next, so that a sample's
depend on how many samples lie before it. Where trials find such loops, each call begins a stream of its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.apply.randomness.names import Names, called
from meshwright.apply.randomness.philox import key_of
from meshwright.trees import tensors_in

__all__: list[str] = []

Site = tuple[str, int]
"""(name of the innermost module, the place in its code as `Names.site` gives it)."""
_FEW = 8
"""Samples below which it may be chance that all of them, or none, have drawn [count]."""


@dataclasses.dataclass(frozen=True)
class Turns:
    """How often code at one place draws in a forward."""

    each: int
    """Calls for each sample; 0: they are for all samples [count]."""
    is_minor: bool = False
    """Whether the samples are the inner loop."""
    count: int | None = None
    """Calls for all samples, where each trial made as many; None: their number varied, or they are a sample's [count]."""


class PythonCalls:
    """The calls of one forward.

    Args:
        text: What its numbers depend on, beside calls and places.
        names: The model's modules.
        first: The place of its first sample in the global batch.
        num_samples: Its samples [count].
        turns: What trials have found, by place in the code; a trial that looks has none.
        is_seeded: Whether each call begins a stream of its own; else calls are counted alone.
        has_lengths: Whether the batch has the lengths of the first one, whose steps code may have drawn for.
        on_unknown: Called with a text about a call whose numbers may depend on the layout; None: nobody is told, as of trials.
    """

    def __init__(
        self,
        text: str,
        names: Names,
        first: int,
        num_samples: int,
        *,
        turns: Mapping[Site, Turns],
        is_seeded: bool = True,
        has_lengths: bool = True,
        on_unknown: Callable[[str], None] | None = None,
    ) -> None:
        self._text = text
        self._names = names
        self._first, self._num_samples = first, num_samples
        self._turns = turns
        self._is_seeded, self._has_lengths = is_seeded, has_lengths
        self._on_unknown = on_unknown
        self.counts: Counter[Site] = Counter()
        """Calls at each place so far [count]."""
        self.made: list[int | None] = []
        """The seeds of all calls so far, which a repetition in backward takes again; None: the next numbers."""
        self.seeded_by_code: dict[object, Any] = {}
        """By generator that the model's own code has seeded, and that draws as it says: the states from before."""

    def next_key(self) -> int | None:
        """Return the seed of the call that the code makes now: 64 bits; None where its numbers are the generator's next ones."""
        key = self._key()
        if not self._is_seeded:
            return None
        self.made.append(key)
        return key

    def count(self) -> None:
        """Count a call of a generator that the model's own code has seeded."""
        self._key()
        self.made.append(None)

    def _key(self) -> int:
        site = name, place = self._names.find(), self._names.site()
        number, turns = self.counts[site], self._turns.get(site)
        self.counts[site] += 1
        text = f"{self._text}/python/{name}/{place}"
        if turns is not None and turns.each:
            if number < turns.each * self._num_samples:
                number, sample = self._in_turn(number, turns)
                return key_of(f"{text}/{number}/sample {self._first + sample}")
            turns = None
        if turns is None and self._on_unknown is not None:
            self._on_unknown(
                f"{called(name)} draws by Python's or NumPy's generator where it did not with the first batch, or more often: "
                + ("each rank draws for itself" if self._is_seeded else "its numbers may depend on the layout")
            )
            text = f"{text}/from {self._first}"
        return key_of(f"{text}/{number}")

    def _in_turn(self, number: int, turns: Turns) -> tuple[int, int]:
        if turns.is_minor:
            return divmod(number, self._num_samples)
        sample, place = divmod(number, turns.each)
        return place, sample

    def again(self) -> PythonCalls:
        """Return the calls of a forward of the same samples, at the same place among its calls; it tells nothing."""
        given = self._text, self._names, self._first, self._num_samples
        calls = PythonCalls(*given, turns=self._turns, is_seeded=self._is_seeded, has_lengths=self._has_lengths)
        calls.counts.update(self.counts)
        calls.seeded_by_code.update(self.seeded_by_code)
        return calls

    def begin_again(self) -> None:
        """Number the calls from the start."""
        self.check()
        self.counts.clear()
        self.seeded_by_code.clear()

    def check(self) -> None:
        """Tell of code that has not drawn in turn, or as often, as it did with the first batch."""
        if self._on_unknown is None:
            return
        for site, turns in self._turns.items():
            for_all = turns.count if self._has_lengths else None
            expected = turns.each * self._num_samples if turns.each else for_all
            if expected is None or self.counts[site] in (0, expected):
                continue
            often = f"{turns.each} times for each sample" if turns.each else f"{turns.count} times"
            self._on_unknown(
                f"{called(site[0])} has not drawn {often} by Python's or NumPy's generator, as with the first batch: its "
                "numbers may depend on the layout"
            )


def lengths_in(batch: Any, num_samples: int | None) -> list[list[int]]:
    """Return the sizes of a batch's tensors, but for those that are its samples, in an order of their own."""
    dense = (tensor for tensor in tensors_in(batch) if not tensor.is_nested)
    return sorted([int(size) for size in tensor.shape if size != num_samples] for tensor in dense)


Counts = tuple[int, Mapping[Site, int]]
"""Samples of a forward, and its calls at each place in the code [count]."""


def varies_with_samples(runs: Sequence[Sequence[Counts]]) -> bool:
    """Tell whether code drew more or less often in a part than in the whole batch.

    Args:
        runs: Of the whole batch, then of its parts; for each set of random numbers.
    """
    return any(+Counter(counts) != +Counter(run[0][1]) for run in runs for _, counts in run[1:])


def has_loop(runs: Sequence[Sequence[Counts]]) -> bool:
    """Tell whether code at any place drew a fixed number of times for each sample; `runs` as for `varies_with_samples`."""
    sites = {site for run in runs for _, counts in run for site in counts}
    return any((turns := _turns_at(site, runs)) is not None and turns.each for site in sites)


def turns_for_all(runs: Sequence[Sequence[Counts]]) -> dict[Site, Turns]:
    """Return the places in the code that drew, as of numbers that are all samples'; `runs` as for `varies_with_samples`."""
    found = {site: _turns_at(site, runs) for run in runs for _, counts in run for site in counts}
    return {site: Turns(0) if turns is None or turns.each else turns for site, turns in found.items()}


def ways_in_turn(runs: Sequence[Sequence[Counts]]) -> list[dict[Site, Turns]]:
    """Return what loops over samples there may be, the likeliest first; nothing where no code draws in turn.

    Args:
        runs: As for `varies_with_samples`.
    """
    found: dict[Site, Turns] = {}
    for site in dict.fromkeys(site for run in runs for _, counts in run for site in counts):
        turns = _turns_at(site, runs)
        if turns is None:
            return []
        found[site] = turns
    if not any(turns.each for turns in found.values()):
        return []
    minor = {site: dataclasses.replace(turns, is_minor=turns.each > 1) for site, turns in found.items()}
    return [found] if minor == found else [found, minor]


def _turns_at(site: Site, runs: Sequence[Sequence[Counts]]) -> Turns | None:
    """Return how often code at one place draws; None where that is neither for each sample nor for all."""
    counts = [[own.get(site, 0) for _, own in run] for run in runs]
    if all(len(set(row)) == 1 for row in counts):
        return Turns(0, count=counts[0][0] if len({row[0] for row in counts}) == 1 else None)
    # A number that is all samples' may decide whether the loop is run at all, or one of each sample's may: few agree by chance.
    if not all(map(any, counts)) and runs[0][0][0] < _FEW:
        return None
    made = [(run, row) for run, row in zip(runs, counts, strict=True) if any(row)]
    each = made[0][1][0] // made[0][0][0][0]
    is_in_turn = all(count == each * num for run, row in made for (num, _), count in zip(run, row, strict=True))
    return Turns(each) if is_in_turn else None


def are_in_turn(turns: Mapping[Site, Turns], run: Sequence[Counts]) -> bool:
    """Tell whether a run, of the whole batch and of its parts, drew as turns say."""
    for site in {site for _, counts in run for site in counts}:
        own, counts = turns.get(site), [counts.get(site, 0) for _, counts in run]
        if own is None:
            return False
        fits = [own.each * num for num, _ in run] if own.each else [counts[0]] * len(run)
        if any(counts) and counts != fits:
            return False
    return True


def turns_to_rows(turns: Mapping[Site, Turns] | None) -> list[list[Any]] | None:
    """Return turns as JSON."""
    return None if turns is None else [[*site, own.each, own.is_minor, own.count] for site, own in turns.items()]


def turns_of_all(told: Sequence[list[list[Any]] | None]) -> tuple[dict[Site, Turns] | None, bool]:
    """Return the turns of all ranks, and whether none contradict one another, from what `turns_to_rows` gave on each."""
    found: dict[Site, Turns] = {}
    are_alike = True
    for name, place, *row in (row for rows in told if rows is not None for row in rows):
        turns = Turns(*row)
        before = found.setdefault((name, place), turns)
        if before.count != turns.count:  # a sequence's length, which ranks' samples decide
            before = found[name, place] = dataclasses.replace(before, count=None)
        are_alike &= (before.each, before.is_minor) == (turns.each, turns.is_minor)
    return (found if are_alike and any(rows is not None for rows in told) else None), are_alike
