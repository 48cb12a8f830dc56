"""One forward: how often each of its modules has drawn, and what a trial notes of a draw."""

from __future__ import annotations

import dataclasses
from collections import Counter

from meshwright.apply.randomness.chosen_rows import ChosenRows, RowsChosen
from meshwright.apply.randomness.probes import Probes
from meshwright.apply.randomness.python_calls import PythonCalls
from meshwright.apply.randomness.sample_dims import Call, Slicing

__all__: list[str] = []


@dataclasses.dataclass
class DrawNote:
    """What a trial has seen of a call."""

    kind: str
    shape: tuple[int, ...]
    slicing: Slicing | None = None
    """The slices of the stream in which it ran, if in any."""
    within: tuple[Call, ...] = ()
    """The modules whose forwards were running, each with the number of its call."""
    is_loose: bool = False
    """Whether a checkpoint repeats it in backward without the generator's state of its forward."""
    is_in_order: bool = False
    """Whether torch's own code lays a sample's entries next to each other."""
    chosen: RowsChosen | None = None
    """What is known of the rows that an index has chosen for it, if one has."""
    moved: tuple[int, ...] = ()
    """The dims along which code has put the samples in another order, and not back."""
    sizes: tuple[int, ...] = ()
    """As `sizes_given` returns them [count]."""
    site: int = 0
    """Where the code stood, as `Names.site` gives it; 0: not known."""


class ForwardDraws:
    """The draws of one forward.

    Args:
        first: The place of its first sample in the global batch.
        num_samples: Its samples [count].
    """

    def __init__(self, first: int, num_samples: int) -> None:
        self.first = first
        self.num_samples = num_samples
        self.counts: Counter[str] = Counter()
        """Draws of each module [count]."""
        self.notes: dict[Call, DrawNote] | None = None
        """What a trial notes, where one runs."""
        self.module_calls: Counter[str] = Counter()
        """Calls of each module, which a trial counts."""
        self.rows = ChosenRows()
        self.sites: dict[Call, int] = {}
        """Where the code stood that made each call, for repetitions in backward."""
        self.python: PythonCalls | None = None
        """Calls of Python's and NumPy's generators, where each has its place."""
        self.probes: Probes | None = None
        """Of a trial that looks for what draws have influence on."""

    def again(self) -> ForwardDraws:
        """Return a forward of the same samples, at the same place among its draws."""
        forward = ForwardDraws(self.first, self.num_samples)
        forward.counts.update(self.counts)
        forward.rows = self.rows.again()
        forward.python = None if self.python is None else self.python.again()
        return forward

    def begin_again(self) -> None:
        """Number the draws from the start."""
        if self.python is not None:
            self.python.begin_again()
        self.counts.clear()
        self.module_calls.clear()
        self.rows.clear()

    def next_call(self, name: str) -> Call:
        """Return the next call of a module."""
        number = self.counts[name]
        self.counts[name] = number + 1
        return name, number
