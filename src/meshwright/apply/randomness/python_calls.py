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

__all__: list[str] = []

Site = tuple[str, int]
"""(name of the innermost module, the place in its code as `Names.site` gives it)."""


@dataclasses.dataclass(frozen=True)
class Turns:
    """How often code at one place draws in a forward."""

    each: int
    """Calls for each sample; 0: as many whatever the samples are, and for all of them [count]."""
    is_minor: bool = False
    """Whether the samples are the inner loop."""


class PythonCalls:
    """The calls of one forward.

    Args:
        text: What its numbers depend on, beside calls and places.
        names: The model's modules.
        first: The place of its first sample in the global batch.
        num_samples: Its samples [count].
        turns: What trials have found, by place in the code; a trial that looks has none.
        on_unknown: Called with a text about a call that draws for this rank alone.
    """

    def __init__(
        self,
        text: str,
        names: Names,
        first: int,
        num_samples: int,
        *,
        turns: Mapping[Site, Turns],
        on_unknown: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._text = text
        self._names = names
        self._first, self._num_samples = first, num_samples
        self._turns = turns
        self._on_unknown = on_unknown
        self.counts: Counter[Site] = Counter()
        """Calls at each place so far [count]."""
        self.made: list[int] = []
        """The seeds of all calls so far, which a repetition in backward takes again."""

    def next_key(self) -> int:
        """Return the seed of the call that the code makes now: 64 bits."""
        self.made.append(self._key())
        return self.made[-1]

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
        if turns is None and self._turns:
            self._on_unknown(
                f"{called(name)} draws by Python's or NumPy's generator where it did not with the first batch, or more often: "
                "each rank draws for itself"
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
        calls = PythonCalls(self._text, self._names, self._first, self._num_samples, turns=self._turns)
        calls.counts.update(self.counts)
        return calls

    def begin_again(self) -> None:
        """Number the calls from the start."""
        self.check()
        self.counts.clear()

    def check(self) -> None:
        """Tell of code that has not drawn in turn, as it did with the first batch."""
        for site, turns in self._turns.items():
            if turns.each and self.counts[site] not in (0, turns.each * self._num_samples):
                self._on_unknown(
                    f"{called(site[0])} has not drawn {turns.each} times for each sample by Python's or NumPy's generator, as "
                    "with the first batch: its numbers may depend on the layout"
                )


def ways_in_turn(runs: Sequence[tuple[int, Mapping[Site, int]]]) -> list[dict[Site, Turns]]:
    """Return what loops over samples there may be, the likeliest first; nothing where no code draws in turn.

    Args:
        runs: Samples, and calls at each place in the code; of the whole batch, then of its parts [count].
    """
    (num_samples, whole), *parts = runs
    found: dict[Site, Turns] = {}
    for site in dict.fromkeys(site for _, counts in runs for site in counts):
        count = whole.get(site, 0)
        if all(own.get(site, 0) == count for _, own in parts):
            found[site] = Turns(0)
            continue
        each, rest = divmod(count, num_samples)
        if rest or not each or any(own.get(site, 0) != each * num for num, own in parts):
            return []
        found[site] = Turns(each)
    if not any(turns.each for turns in found.values()):
        return []
    minor = {site: dataclasses.replace(turns, is_minor=turns.each > 1) for site, turns in found.items()}
    return [found] if minor == found else [found, minor]


def turns_to_rows(turns: Mapping[Site, Turns] | None) -> list[list[Any]] | None:
    """Return turns as JSON."""
    return None if turns is None else [[*site, own.each, own.is_minor] for site, own in turns.items()]


def turns_of_all(told: Sequence[list[list[Any]] | None]) -> tuple[dict[Site, Turns] | None, bool]:
    """Return the turns of all ranks, and whether none contradict one another, from what `turns_to_rows` gave on each."""
    found: dict[Site, Turns] = {}
    are_alike = True
    for name, place, *row in (row for rows in told if rows is not None for row in rows):
        turns = Turns(*row)
        are_alike &= found.setdefault((name, place), turns) == turns
    return (found if are_alike and any(rows is not None for rows in told) else None), are_alike
