"""Findings of trials of the first batch about a model's draws, on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwright.apply.randomness.forward_draws import DrawNote
from meshwright.apply.randomness.names import draw_called
from meshwright.apply.randomness.python_calls import Site, Turns
from meshwright.apply.randomness.sample_dims import Call, SiteDims, find_dims
from meshwright.apply.randomness.sample_loops import find_loops, note_loops
from meshwright.run.losses.drawn import Tried
from meshwright.run.trial_draws import TrialDraws

__all__: list[str] = []


@dataclasses.dataclass
class DrawsFound:
    """What one rank's trials have shown."""

    share: Any = None
    """The batch that was tried."""
    draws: bool = False
    """Whether a forward draws."""
    seeds: bool = False
    """Whether a forward seeds torch's generator before it draws."""
    is_proven: bool = True
    """Whether parts gave the outputs of the whole."""
    by_sample: bool = False
    """Whether Python's or NumPy's generator may draw for each sample."""
    uses_python: bool = False
    """Whether Python's or NumPy's generator draws."""
    turns: Mapping[Site, Turns] | None = None
    """How often code draws by these, by its place; None: it does not."""
    varies: bool = False
    """Whether code draws by these more or less often for parts, and their outputs do not show why."""
    uses_own: bool = False
    """Whether a generator that the model's code keeps draws."""
    is_unseen: bool = False
    """Whether torch's generator draws where no call is seen."""
    loose: list[str] = dataclasses.field(default_factory=list)
    """Calls that a checkpoint repeats without the generator's state of their forward."""
    unclear: list[str] = dataclasses.field(default_factory=list)
    """Calls whose samples lie in an order that could not be tried."""
    dims: dict[Call, SiteDims] = dataclasses.field(default_factory=dict)
    notes: dict[Call, DrawNote] = dataclasses.field(default_factory=dict)
    """What the whole drew, with any of the numbers that decide which calls are made."""
    chances: list[int] = dataclasses.field(default_factory=list)
    """The numbers of those, beside the first, with which it made calls that it had not made before."""
    inside: dict[Call, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """Draws of each module during each call."""
    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    """The outputs of the whole, with draws by place."""
    losses: Tried = None
    apart: str = ""
    """Why gradients of parts do not give the whole's."""

    def noted(self, made: list[TrialDraws]) -> list[TrialDraws]:
        """Take note of generators that do not draw by place, and return these forwards.

        Args:
            made: Forwards that have run.
        """
        self.uses_own |= any(one.uses_own for one in made)
        self.uses_python |= any(one.uses_python for one in made)
        self.is_unseen |= any(one.is_unseen for one in made)
        self.loose += [draw_called(call) for one in made for call, note in one.notes.items() if note.is_loose]
        return made

    def note_dims(self, whole: TrialDraws, pieces: Sequence[TrialDraws]) -> None:
        """Find the sample dims of calls by the shapes of the whole batch and of its parts."""
        for call, drawn in whole.notes.items():
            shapes = [(piece.num_samples, piece.notes[call].shape) for piece in pieces if call in piece.notes]
            dims = find_dims([(whole.num_samples, drawn.shape), *shapes], may_vary=True)
            if dims is None:
                continue
            if dims.dim is not None and dims.is_merged:
                rows = (drawn.shape[dims.dim] // whole.num_samples, *drawn.sizes)
                dims = dataclasses.replace(dims, rows=(rows,))
            inner = drawn.shape[0 if dims.dim is None else dims.dim + 1 :]
            is_beside = not dims.is_merged and dims.dim in drawn.moved
            before = self.dims.setdefault(
                call, dataclasses.replace(dims, inner=inner, kind=drawn.kind, is_beside=is_beside, site=drawn.site)
            )
            if before.dim != dims.dim and before.num_dims == dims.num_dims:  # chance decides what the call is
                self.unclear.append(draw_called(call))

    def note_loops(self, whole: TrialDraws, pieces: Sequence[TrialDraws]) -> dict[str, int]:
        """Note draws of loops over samples by one turn; return the modules that make them."""
        shapes = [{call: note.shape for call, note in one.notes.items()} for one in (whole, *pieces)]
        loops = find_loops([(one.num_samples, own) for one, own in zip((whole, *pieces), shapes, strict=True)])
        note_loops(self.dims, {call: (note.shape, note.kind) for call, note in whole.notes.items()}, loops)
        return loops
