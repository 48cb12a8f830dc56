"""Protocol of `ranks/calls.py`, the calls that all ranks make together, as a communicator uses it."""

from __future__ import annotations

from typing import Any, Protocol

from meshwright.errors import MeshwrightError

__all__: list[str] = []


class PeerCalls(Protocol):
    """The call that this rank makes with its peers, and their reports about it."""

    has_given_up: bool
    """Whether this rank has stopped waiting for others in it."""

    @property
    def current(self) -> int:
        """Number of the current call; 0 between calls."""
        ...

    def others_error(self) -> MeshwrightError | None:
        """Return the error of a peer that has raised in this call, or None."""
        ...

    def wait_for(self, work: Any) -> None:
        """Wait for the end of an exchange; raise where a peer has raised and will not come."""
        ...
