"""Checks of arguments by torch.distributions, which read values that most stages do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributions import Distribution

__all__: list[str] = []


@contextlib.contextmanager
def without_argument_checks() -> Iterator[None]:
    """Turn torch's checks of distributions off in the context, where nobody asks for them: they decide nothing.

    A branch on values of a late layer is refused, and `if not valid.all(): raise` is one. What is not valid gives NaN, which
    every step looks for. A distribution made with `validate_args=True` is still checked.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
