"""What a communicator asks of the calls that all ranks are in the middle of together (`ranks/calls.py`)."""

from __future__ import annotations

from typing import Any, Protocol

from meshwright.errors import MeshwrightError

__all__: list[str] = []


class PeerCalls(Protocol):
    """The call that this rank makes with its peers, and what they have said of it."""

    has_given_up: bool
    """Whether this rank has stopped waiting for others in it."""

    @property
    def current(self) -> int:
        """Number of the call under way; 0 between calls."""
        ...

    def others_error(self) -> MeshwrightError | None:
        """Return the error of a peer that has raised in this call, or None."""
        ...

    def wait_for(self, work: Any) -> None:
        """Return when an exchange is over; raise where a peer has raised and does not come."""
        ...
