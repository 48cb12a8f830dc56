"""Draws that another pipeline stage makes: counted here, so that all stages number the later ones alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from meshwright.apply.randomness.chosen_rows import is_around
from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.names import called
from meshwright.apply.randomness.sample_dims import Call
from meshwright.apply.randomness.sites import StepDraws, running_draws

__all__: list[str] = []


def pass_over_draw(given: Sequence[Tensor]) -> None:
    """Count a draw of code between modules.

    Args:
        given: What the function that draws was given, or stand-ins for it.
    """
    drawn = running_draws()
    if drawn is not None:
        step, forward = drawn
        _count_rows(step, forward, forward.next_call(step.names.find()), given, within=None)


def pass_over_call(name: str, number: int, given: Sequence[Tensor]) -> None:
    """Count the draws of a module's call.

    Args:
        name: The module.
        number: Its calls in this forward before this one [count].
        given: What it is called with, or stand-ins for it.
    """
    drawn = running_draws()
    if drawn is None or not drawn[0].inside:
        return
    step, forward = drawn
    for inner, count in step.inside.get((name, number), {}).items():
        for _ in range(count):
            _count_rows(step, forward, forward.next_call(inner), given, within=name)


@contextlib.contextmanager
def as_often_as_counted(name: str, number: int) -> Iterator[None]:
    """Tell where a module's call inside the context draws another number of times than other stages count.

    Args:
        name: The module.
        number: Its calls in this forward before this one [count].
    """
    drawn = running_draws()
    if drawn is None or not drawn[0].inside or not drawn[0].names.is_training:
        yield
        return
    step, forward = drawn
    names, first = step.names.shared | step.of_several_calls.get(name, frozenset()), step.inside.get((name, number), {})
    before = {inner: forward.counts[inner] for inner in names}
    yield
    for inner in names:
        times = forward.counts[inner] - before[inner]
        if times != first.get(inner, 0):
            step.on_unknown(
                f"{called(inner)} has drawn {times} times in a call of {called(name)}, and {first.get(inner, 0)} times with the "
                "first batch, which other stages go by: its later numbers may depend on the layout"
            )


def _count_rows(
    step: StepDraws, forward: ForwardDraws, call: Call, given: Sequence[Tensor], *, within: str | None
) -> None:
    """Count what a draw makes for each of the rows that it follows: those of the first tensor that is given.

    Where they are not known here, as those that a module on another stage chooses, no later draw of the module knows its turns.
    """
    dims = step.dims.get(call)
    if dims is None or dims.follows is None or dims.dim is None:
        return
    is_inside = within is not None and (dims.follows == within or is_around(within, dims.follows))
    rows = next((tensor for tensor in given if tensor.dim() > dims.dim and tensor.dim() == dims.num_dims), None)
    place = {"first": forward.first, "num_samples": forward.num_samples, "row_stride": 1}
    found = (
        None
        if is_inside or rows is None
        else forward.rows.place(call, dims, rows.shape[dims.dim], given=[rows], **place)
    )
    if found is None:
        forward.rows.unknown_turns.add(call[0])
