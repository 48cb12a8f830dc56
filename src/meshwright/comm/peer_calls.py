"""Protocol of `ranks/calls.py`, the calls that all ranks make together, as a communicator uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshSpec

__all__: list[str] = []

NUMBER_BITS: Final = 40
"""Bits of `PeerCalls.current` below the call's kind [count]."""


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

    @property
    def name_number(self) -> int:
        """Number of the current call's kind, of whatever model; 0 between calls."""
        ...

    def different(self, told: Mapping[int, int]) -> MeshwrightError:
        """Return the error for ranks in different calls, from `current` of each, by rank."""
        ...

    def apart(self, ranks: Sequence[int], error: Exception) -> MeshwrightError | None:
        """Return the error for ranks of an exchange about which they do not agree; None outside of calls."""
        ...

    def others_error(self) -> MeshwrightError | None:
        """Return the error of a peer that has raised in this call, or None."""
        ...

    def wait_for(self, work: Any) -> None:
        """Wait for the end of an exchange; raise where a peer has raised and will not come."""
        ...


def with_kind(length: int, calls: PeerCalls | None) -> int:
    """Return a length with the kind of this rank's call in the bits above it, so that both travel as one number."""
    return length if calls is None else length + (calls.name_number << NUMBER_BITS)


def lengths_of(numbers: Sequence[int], ranks: Sequence[int], calls: PeerCalls | None) -> list[int]:
    """Return the lengths of `with_kind` of all ranks of a group.

    Raises:
        MeshwrightError: Ranks are in calls of different kinds, so that what they send is not for one another.
    """
    kinds = {rank: number >> NUMBER_BITS << NUMBER_BITS for rank, number in zip(ranks, numbers, strict=True)}
    if calls is not None and len({*kinds.values()}) > 1:
        raise calls.different(kinds)
    return [number & (1 << NUMBER_BITS) - 1 for number in numbers]
