"""Protocol of `ranks/calls.py`, the calls that all ranks make together, as a communicator uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshSpec

__all__: list[str] = []


class PeerCalls(Protocol):
    """The call that this rank makes with its peers, and their reports about it."""

    has_given_up: bool
    """Whether this rank has stopped waiting for others in it."""
    meshes: list[MeshSpec]
    """Meshes of the plans that have given ranks of dp generators of their own, the same on every rank."""

    @property
    def current(self) -> int:
        """Number of the current call; 0 between calls."""
        ...

    @property
    def kind(self) -> int:
        """Number of the current call's kind and model; 0 between calls."""
        ...

    def different(self, told: Mapping[int, int]) -> MeshwrightError:
        """Return the error for ranks in different calls, from `current` of each, by rank."""
        ...

    def stand(self, ranks: Sequence[int]) -> MeshwrightError | None:
        """Return the error for ranks of an exchange about which they do not agree; None where they are in one call."""
        ...

    def others_error(self) -> MeshwrightError | None:
        """Return the error of a peer that has raised in this call, or None."""
        ...

    def wait_for(self, work: Any) -> None:
        """Wait for the end of an exchange; raise where a peer has raised and will not come."""
        ...
