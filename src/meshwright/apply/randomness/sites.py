"""Call sites of draws, the forwards and steps that they belong to, and the places of what they draw.

A call is known by the innermost module whose forward is running and by its number among that module's draws in this forward. So
a pipeline stage, which runs some modules only, names the calls of those as one process does.

In backward, a checkpoint repeats forwards. It restores torch's generator, from which each draw takes a number first (its mark):
by that a repeated draw is recognised, whoever wrote the checkpoint. A forward of an own loop is `kept` for its backward.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from meshwright._torch_dispatch import draws_intercepted, draws_untouched, intercept_draws
from meshwright._torch_private import is_in_backward, is_in_loose_checkpoint
from meshwright.apply.randomness.chosen_rows import ChosenRows
from meshwright.apply.randomness.forward_draws import DrawNote, ForwardDraws
from meshwright.apply.randomness.known_dims import cut_in_turn, dims_of_call, of_several_calls
from meshwright.apply.randomness.names import LOSS, Names, batch_of_attention, called
from meshwright.apply.randomness.philox import NO_SAMPLE, ElementPlace, Level, key_of, merge_levels
from meshwright.apply.randomness.row_places import has_other_rows, is_on_rows, place_in_rows, sizes_given
from meshwright.apply.randomness.row_slices import place_pieces
from meshwright.apply.randomness.sample_dims import Call, SiteDims, Slicing, locate
from meshwright.apply.randomness.sample_loops import in_turn, loops_of
from meshwright.errors import ApplyError

__all__: list[str] = []


class StepDraws:
    """The draws of one step, trial or evaluation.

    Args:
        text: What its numbers depend on, beside calls and places: the seed, the kind of run and its number.
        names: The model's modules.
        dims: Known sample dims, by call.
        inside: Draws of each module during a call of another, by that call: what is numbered where the call is left out.
        share: The name of this rank's share, for calls that cannot be known.
        part: The name of this rank among those that share layers, for calls whose cut cannot be known; empty: there are none.
        on_unknown: Called with a text about a call that draws for this rank alone.
        left: Why torch's generators draw, for `on_unknown`; None: they do not.
    """

    def __init__(
        self,
        text: str,
        names: Names,
        dims: Mapping[Call, SiteDims],
        *,
        inside: Mapping[Call, Mapping[str, int]] | None = None,
        share: str = "",
        part: str = "",
        on_unknown: Callable[[str], None] = lambda _: None,
        left: str | None = None,
    ) -> None:
        self.text = text
        self.names = names
        self.dims = dims
        self.inside = inside or {}
        self.share = share
        self.part = part
        self.on_unknown = on_unknown
        self.left = left
        self.num_samples: int | None = None
        """Rows that the one forward of an own loop was given; None: another kind of step [count]."""
        self.seeds: dict[int, int] = {}
        """Seeds of calls of Python's and NumPy's generators, by their marks."""
        self._known: dict[int, tuple[Call, ForwardDraws]] = {}
        self._twice: set[int] = set()

    @functools.cached_property
    def loops(self) -> dict[str, int]:
        """Draws for each sample, by the names of modules that draw in a loop over samples [count]."""
        return loops_of(self.dims)

    @functools.cached_property
    def cut_in_turn(self) -> dict[str, int]:
        """Draws of modules whose cuts their numbers alone tell, by name [count]."""
        return cut_in_turn(self.dims) if self.part else {}

    @functools.cached_property
    def of_several_calls(self) -> dict[str, frozenset[str]]:
        """Modules that draw inside of a module which a forward calls more than once, by its name."""
        return of_several_calls(self.inside)

    def again(self) -> StepDraws:
        """Return draws of the same numbers, which a look at the step may repeat: it leaves no marks, and tells nothing."""
        return StepDraws(self.text, self.names, self.dims, inside=self.inside, share=self.share, part=self.part)

    @property
    def marks(self) -> frozenset[int]:
        """The marks of all draws so far."""
        return frozenset(self._known)

    def call_at(self, mark: int, forward: ForwardDraws) -> Call:
        """Return the call of a forward that draws now.

        Args:
            mark: The number that torch's generator gave.
            forward: The forward that is running.
        """
        call, before = forward.next_call(self.names.find()), self._known.get(mark)
        if before is not None and (before[0] != call or before[1] is not forward):
            self._twice.add(mark)
        self._known[mark] = call, forward
        return call

    def repeated(self, mark: int) -> tuple[Call, ForwardDraws] | None:
        """Return the call that backward repeats, and its forward; None where this step has not made it.

        Raises:
            ApplyError: It cannot be told from another.
        """
        if mark in self._twice:
            raise ApplyError(
                "a forward that is repeated in backward seeds torch's generator, so that its draws cannot be told apart "
                "with rng='global'",
                fix="use recompute=none, mw.apply_plan(..., rng='torch'), or torch.rand(..., generator=...) for such numbers",
            )
        return self._known.get(mark)

    def place_of(self, call: Call, forward: ForwardDraws, shape: tuple[int, ...], kind: str) -> ElementPlace:
        """Return the places of a call's elements, in a tensor of this shape."""
        drawn, sample = in_turn(call, self.dims, forward.num_samples)
        name, number = drawn
        text = f"{self.text}/{name}/{number}"
        dims, found = self._dims_of(drawn, forward, forward.sites.get(call, 0), shape, kind), None
        if dims is not None and sample is not None and not dims.loop:
            dims = None  # another kind of draw than the first batch made in this turn
        if dims is not None and dims.follows is not None:
            if name in self.names.shared and not is_in_backward() and self.names.runs_in_place_of(dims.follows):
                self.on_unknown(
                    f"draw {number} of {called(name)} ({kind}) follows rows of {called(dims.follows)} with the first batch, and "
                    "another layer runs now: it may depend on the layout. Give each layer a dropout of its own"
                )
            slicing = _running.slicing
            place = place_in_rows(call, forward, shape, dims, names=self.names, text=self.text, slicing=slicing)
            if place is not None:
                return place
        elif dims is not None and not dims.is_apart:
            if is_on_rows(forward, shape, dims, self.names):
                self.on_unknown(
                    f"draw {number} of {called(name)} ({kind}) may be on rows that an index has chosen, as in no trial of the "
                    "first batch: it may depend on the layout"
                )
            slicing = _running.slicing
            if slicing is None and not is_in_backward() and has_other_rows(forward, shape, dims, self.names):
                self.on_unknown(
                    f"draw {number} of {called(name)} ({kind}) has another number of rows for each sample than in the first "
                    "batch, which no size of what modules were given explains: it may depend on the layout"
                )
            found = _located(shape, dims, forward.num_samples, slicing)
            if found is None and (place := place_pieces(key_of(text), shape, dims, forward, slicing)) is not None:
                return place
        if 0 in shape:
            return ElementPlace(key_of(text), (Level(0, 0, 1),), NO_SAMPLE)  # an expert without tokens
        if dims is None or found is None:
            what = "sample dim" if dims is None or not dims.is_apart else "place in the full tensor"
            self.on_unknown(f"draw {number} of {called(name)} ({kind}) has no known {what}: each rank draws for itself")
            part = (self.part if dims is not None and dims.is_apart else "") + ("" if sample is None else f"/{sample}")
            loops = merge_levels([Level(math.prod(shape), 0, 1)])
            return ElementPlace(key_of(f"{text}/{self.share}/{forward.first}/{part}"), loops, NO_SAMPLE)
        if dims.loop and sample is not None:
            return ElementPlace(key_of(text), found.levels, forward.first + sample, found.first_index)
        first = NO_SAMPLE if dims.dim is None else forward.first + found.first_sample
        return ElementPlace(key_of(text), found.levels, first, found.first_index)

    def _dims_of(
        self, call: Call, forward: ForwardDraws, site: int, shape: tuple[int, ...], kind: str
    ) -> SiteDims | None:
        """Return a call's dims; of one that no trial has made, those of the module's other draws, or of all of the model's."""
        given = {"num_samples": forward.num_samples, "shares_layers": bool(self.part)}
        dims, is_guess = dims_of_call(call, site, shape, kind, self.dims, **given)
        if is_guess:
            self.on_unknown(
                f"draw {call[1]} of {called(call[0])} ({kind}) was not made by the first batch: its sample dim is "
                "taken to be that of the model's other draws"
            )
        return dims


_located = functools.lru_cache(maxsize=4096)(locate)


class _Running(threading.local):
    """The step and the forward that run in this thread."""

    step: StepDraws | None = None
    forward: ForwardDraws | None = None
    slicing: Slicing | None = None


_Found = TypeVar("_Found")
_running = _Running()
_under_way: list[StepDraws] = []
"""Steps that run in this process, for autograd's threads of other devices, in which backward repeats forwards."""
_kept: weakref.WeakSet[StepDraws] = weakref.WeakSet()
"""Draws of own loops' forwards, which a backward outside of `in_step` may repeat."""


def draws_by_place() -> bool:
    """Tell whether what this thread runs draws by place."""
    return _running.step is not None and _running.step.left is None


@contextlib.contextmanager
def in_step(step: StepDraws | None) -> Iterator[None]:
    """Draw for a step inside the context, in forwards and what backward repeats of them; None draws as torch does."""
    before = _running.step, _running.forward
    _running.step, _running.forward = step, None
    if step is not None:
        _under_way.append(step)
    try:
        with draws_intercepted(step is not None):
            yield
    finally:
        _running.step, _running.forward = before
        if step is not None:
            _under_way.remove(step)


def keep(step: StepDraws) -> None:
    """Recognise, as long as this object lives, what a backward outside of `in_step` repeats of its forward.

    This thread's draws go through Python from now on; outside of backward torch's own answer, until nothing is kept.
    """
    _kept.add(step)
    intercept_draws(True)


def repeats_recognised() -> contextlib.AbstractContextManager[None]:
    """Return the context of a backward that may repeat kept forwards, in another thread than theirs too."""
    return draws_intercepted(True) if _kept else contextlib.nullcontext()


def in_forward(forward: ForwardDraws) -> contextlib.AbstractContextManager[None]:
    """Return the context of one forward of the step."""
    return _InForward(forward)


class _InForward:
    """A context with another forward; of no generator, since there is one for each micro-batch."""

    __slots__ = ("_before", "_forward")

    def __init__(self, forward: ForwardDraws) -> None:
        self._forward = forward
        self._before: ForwardDraws | None = None

    def __enter__(self) -> None:
        self._before, _running.forward = _running.forward, self._forward

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            _check_loops(self._forward)
        _running.forward = self._before


def _check_loops(forward: ForwardDraws) -> None:
    """Tell of modules that have not drawn in turn, as they did in the first batch."""
    step = _running.step
    if step is None:
        return
    for name, each in step.loops.items():
        if forward.counts[name] not in (0, each * forward.num_samples):
            text = f"{called(name)} has not drawn {each} times for each sample, as with the first batch: "
            step.on_unknown(text + "its numbers may depend on the layout")
    for name, number in step.cut_in_turn.items():
        if forward.counts[name] not in (0, number):
            step.on_unknown(
                f"{called(name)} has drawn {forward.counts[name]} times, and {number} times with the first batch, inside of cut "
                "layers and outside: which is which may be mistaken. Give each of these layers a dropout of its own"
            )


@contextlib.contextmanager
def on_slices(slicing: Slicing) -> Iterator[None]:
    """Run a layer on slices of the stream inside the context."""
    before = _running.slicing
    _running.slicing = slicing
    try:
        yield
    finally:
        _running.slicing = before


def running_draws() -> tuple[StepDraws, ForwardDraws] | None:
    """Return the step and the forward that draw by place in this thread; None where none does."""
    step, forward = _running.step, _running.forward
    return None if step is None or step.left is not None or forward is None else (step, forward)


def running_forward() -> ForwardDraws | None:
    """Return the forward that runs in this thread, whoever draws its numbers; None where none does."""
    return _running.forward


@contextlib.contextmanager
def drawing_again(drawn: tuple[StepDraws, ForwardDraws]) -> Iterator[None]:
    """Draw inside the context what is about to be drawn, and leave the later draws as they are without it."""
    step, forward = drawn
    with in_step(step.again()), in_forward(forward.again()):
        yield


def begin_again() -> None:
    """Number the draws of this forward from the start: another stage of this rank runs it now."""
    forward = _running.forward
    if forward is not None:
        _check_loops(forward)
        forward.begin_again()


def place_of_draw(shape: tuple[int, ...], kind: str) -> ElementPlace | None:
    """Return the places of a draw that runs now; None where it is torch's own: it belongs to no forward.

    Args:
        shape: Of the tensor.
        kind: What draws, for messages.
    """
    step, forward = _running.step, _running.forward
    if is_in_backward():
        found = repeated(StepDraws.repeated)
        if found is None and step is not None:
            step.on_unknown(
                "code that runs in backward draws, which is left to torch's generator: each rank draws for itself"
            )
        return None if found is None else found[0].place_of(*found[1], shape, kind)
    if step is None:
        if not _kept:
            intercept_draws(False)
        return None
    if step.left is not None:
        step.on_unknown(step.left)
        return None
    if forward is None:
        return None
    call = step.call_at(take_mark(), forward)
    forward.sites[call] = site = step.names.site()
    if forward.notes is not None:
        within = tuple((name, forward.module_calls[name] - 1) for name in step.names.running())
        running, given = {name for name, _ in within} | {LOSS}, list(step.names.given())
        forward.notes[call] = DrawNote(
            kind,
            shape,
            _running.slicing,
            within,
            is_loose=is_in_loose_checkpoint(),
            is_in_order=batch_of_attention() == forward.num_samples,
            chosen=forward.rows.look(shape, running, given, forward.num_samples),
            sizes=sizes_given(given, forward.num_samples),
            site=site,
            moved=tuple(d for d in range(len(shape)) if forward.rows.has_moved(forward.num_samples, d)),
        )
    return step.place_of(call, forward, shape, kind)


def take_mark() -> int:
    """Return the number by which a repetition in backward is known."""
    with draws_untouched():
        return int(torch.empty((), dtype=torch.int64).random_())


def repeated(find: Callable[[StepDraws, int], _Found | None]) -> tuple[StepDraws, _Found] | None:
    """Return what backward repeats now, with the step that made it, by the mark that its generator gives."""
    step = _running.step
    steps = [one for one in ([step] if step is not None else [*reversed(_under_way), *_kept]) if one.left is None]
    if not steps:
        return None
    state, mark = torch.get_rng_state(), take_mark()
    for step in steps:
        found = find(step, mark)
        if found is not None:
            return step, found
    torch.set_rng_state(state)  # a forward of another model, which torch's generator has drawn for, takes no marks
    return None


def choosing() -> tuple[ChosenRows, str] | None:
    """Return the choices of the forward that runs, and the module that chooses; None where nothing draws by place."""
    step, forward = _running.step, _running.forward
    if step is None or step.left is not None or forward is None or is_in_backward():
        return None
    return forward.rows, step.names.find()


def tell_own(kind: str) -> None:
    """Tell that a call draws from torch's own generator, whose numbers depend on the layout."""
    step, forward = _running.step, _running.forward
    if step is not None and forward is not None:
        where = called(step.names.find())
        step.on_unknown(f"{where} draws with {kind}, which is left to torch's generator: each rank draws for itself")
