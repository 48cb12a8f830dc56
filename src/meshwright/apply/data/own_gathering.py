"""Units gathered for what a script drives: whole parameters, and forwards and backwards of an own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshwright.apply.data.flat_unit import FlatUnit
from meshwright.errors import ApplyError
from meshwright.trees import map_tensors

__all__: list[str] = []


class OwnGathering:
    """Base of `Gathering`."""

    _units: list[FlatUnit]
    _gathered: set[int]
    _everything_whole: bool
    _phase: str

    def _make_whole(self, index: int) -> None:
        raise NotImplementedError

    def _let_all_go(self) -> None:
        raise NotImplementedError

    def _end_phase(self) -> None:
        raise NotImplementedError

    def begin_backward(self) -> None:
        """Begin a backward."""
        raise NotImplementedError

    def as_views(self, outputs: Any) -> Any:
        """Return a forward's outputs, of which gathered parameters are views: those keep their values, and give gradients.

        A parameter itself reads as NaN from its unit's release on, before a script or a trial computes a loss of it.
        """
        gathered = {id(parameter) for index in self._gathered for parameter in self._units[index].parameters}

        def view(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) and id(tensor) in gathered else tensor

        return map_tensors(outputs, view)

    def leave_forward(self) -> None:
        """Release the units that a failed pass has left whole; nothing is exchanged."""
        self._let_all_go()
        self._phase = "none"

    def end_forward(self) -> None:
        """End a forward whose backward comes later, in an own loop."""
        self._end_phase()
        self._phase = "none"

    def begin_own_backward(self, *, is_alone: bool) -> None:
        """Begin a backward of an own loop; one of several forwards takes place on whole units, in any order."""
        if is_alone:
            self.begin_backward()
            return
        self._everything_whole = True
        for index in sorted(self._gathered):
            self._make_whole(index)

    def end_own_backward(self) -> None:
        """End it; what has not been summed is summed after it."""
        if self._phase == "backward":
            self._end_phase()
            self._phase = "none"

    def end_own_exchange(self) -> None:
        """Release the whole units."""
        if self._everything_whole:
            self._everything_whole = False
            self._let_all_go()

    @contextlib.contextmanager
    def everything_whole(self) -> Iterator[None]:
        """Keep all units whole inside the context. Every rank enters it."""
        before, self._everything_whole = self._everything_whole, True
        for index in sorted(self._gathered):
            self._make_whole(index)
        try:
            yield
        finally:
            self._everything_whole = before
            for index in self._gathered:
                self._units[index].keep_changes()
            self._let_all_go()


@contextlib.contextmanager
def released_on_error(gathering: OwnGathering) -> Iterator[None]:
    """Release the units that a pass inside the context leaves whole where its code raises; nothing is exchanged."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ApplyError):  # of a value that was written: the first error says more
            gathering.leave_forward()
        raise
