"""Numbers that a layer's code reads of made-up values, answered otherwise: what it returns behind a threshold that none reaches.

A batch of one sample never has more than three chosen rows, and zeros have no large norm. So that a branch behind such a number
is seen, the call runs again, and the place that reads it is given another number.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.apply.pipeline.tracing.functions import writes_to
from meshwright.trees import tensors_in

__all__: list[str] = []

_READ = frozenset(
    ["__bool__", "__int__", "__float__", "__index__", "item", "is_nonzero", "tolist", "equal", "allclose"]
)
_OTHERS: dict[type, tuple[Any, ...]] = {bool: (False, True), int: (0, 7, 300), float: (0.0, 1e4, -1e4)}
_MOST_PLACES = 8
"""Places of a call that are answered otherwise [count]."""
_MOST_ANSWERS = 64
"""Times that a place is answered otherwise in a run: a loop that waits for a number must end [count]."""
_TORCH = str(Path(torch.__file__).parent)

Place = tuple[CodeType, int, type]
"""Code, its line, and the type of the numbers that it reads there. A line stands for all of a loop's reads of its condition."""


class Answers(TorchFunctionMode):
    """Follows what made-up tensors become inside of a call, and notes where its code reads a number of them.

    Args:
        place: Where another number is answered; None: nowhere.
        number: What is answered there, in place of each number that is read.
    """

    def __init__(self, place: Place | None = None, number: Any = None) -> None:
        super().__init__()
        self.read: dict[Place, None] = {}
        """The places that read numbers of made-up values, in their order."""
        self._place, self._number = place, number
        self._num_left = _MOST_ANSWERS
        self._made_up: dict[int, Tensor] = {}  # held, so that no other tensor gets an id of these

    def made_up(self, tensors: Iterable[Tensor]) -> None:
        """Take note of tensors whose numbers are made up."""
        self._made_up.update((id(tensor), tensor) for tensor in tensors)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if not any(id(tensor) in self._made_up for tensor in tensors_in((args, kwargs))):
            return outputs
        if getattr(func, "__name__", "") in _READ:
            return self._answer(outputs)
        self.made_up(tensors_in((outputs, writes_to(func, args, kwargs))))
        return outputs

    def _answer(self, value: Any) -> Any:
        kind = _kind_of(value)
        if kind is None:
            return value
        place = (*_line_of_caller(), kind)
        self.read[place] = None
        if place != self._place or not self._num_left:
            return value
        self._num_left -= 1
        return _replaced(value, self._number)


def other_answers(read: Iterable[Place]) -> Iterator[Answers]:
    """Yield what follows the next run of a call, one for each other number at each of the places that read one."""
    for place in itertools.islice(read, _MOST_PLACES):
        for number in _OTHERS[place[-1]]:
            yield Answers(place, number)


def _kind_of(value: Any) -> type | None:
    while isinstance(value, list):
        if not value:
            return None
        value = value[0]
    return type(value) if type(value) in _OTHERS else None


def _replaced(value: Any, number: Any) -> Any:
    return [_replaced(item, number) for item in value] if isinstance(value, list) else number


def _line_of_caller() -> tuple[CodeType, int]:
    """Return the code that reads, outside of torch and of this file, and its line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)
    ):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno
