"""Work of a rank that goes on in a thread and is lost where processes end first: saves in the background."""

from __future__ import annotations

import time
from typing import Final, Protocol

__all__: list[str] = []

LEAVE_S: Final = 60.0
"""How long a rank whose code calls sys.exit waits for its save in the background [s]."""
_LOOK_EVERY_S: Final = 0.02


class Work(Protocol):
    """Something that is under way."""

    @property
    def text(self) -> str:
        """What it is, for an error."""
        ...

    def is_over(self) -> bool:
        """Tell whether nothing of it is lost any more where all ranks end now."""
        ...


_works: list[Work] = []


def begin(work: Work) -> None:
    """Note what has begun; what is over is forgotten."""
    _works[:] = [*under_way(), work]


def under_way() -> list[Work]:
    """Return what is not over."""
    return [work for work in _works if not work.is_over()]


def noted(error: BaseException) -> BaseException:
    """Return an error that says what is lost with the ranks, which it ends."""
    for work in under_way():
        error.add_note(f"{work.text} was under way, and may be lost")
    return error


def await_all(limit_s: float) -> list[Work]:
    """Wait until all is over; return what is not.

    Args:
        limit_s: How long to wait [s].
    """
    until = time.monotonic() + limit_s
    while (left := under_way()) and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
    return left
