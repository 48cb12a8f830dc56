"""Checks of arguments by torch.distributions, which branch on values that most stages do not have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright._torch_private import FakeTensor, without_function_modes
from meshwright.apply.pipeline.walking.stand_ins import StandIn

__all__: list[str] = []

_CONSTRAINTS = "torch.distributions.constraints"

_ASKS = "_is_all_true"
"""The function by which a distribution asks whether its arguments are valid: it raises ValueError where they are not. So do
checks of transformers' models."""

_ASSERTS = "_assert"
"""torch's assertion, which traced models have."""


def is_check(func: Callable[..., Any]) -> bool:
    """Tell whether a torch function is such a question, which decides nothing but an error."""
    return getattr(func, "__name__", "") in (_ASKS, _ASSERTS) or (func is Tensor.__bool__ and _asks_constraint())


def _asks_constraint() -> bool:
    """Tell whether a constraint looks at a value (whether a covariance matrix is symmetric, before it is factorized), or an
    assertion of torch's.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        frame = frame.f_back
    if frame is None:
        return False
    place = frame.f_globals.get("__name__"), frame.f_code.co_name
    return place[0] == _CONSTRAINTS or place == ("torch", _ASSERTS)


def is_valid(func: Callable[..., Any], values: Any, *message: Any) -> bool | Tensor:
    """Answer such a question: by the values on the stage that has them, which raises as one device does; yes on the others.

    Args:
        func: What asks.
        values: What is true of each valid number.
        message: Of what it raises, where it takes one.
    """
    with without_function_modes():
        if not isinstance(values, (StandIn, FakeTensor)):
            return func(values, *message)
        return True if func is Tensor.__bool__ else torch.ones((), dtype=torch.bool)
