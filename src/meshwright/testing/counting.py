"""Counts of a code block's exchanges, from the model's ledger."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Protocol

from meshwright.comm.ledger import Ledger, LedgerEntry

__all__: list[str] = []


class HasLedger(Protocol):
    """A model under a plan, or a world."""

    @property
    def ledger(self) -> Ledger:
        """The ledger that its exchanges are counted in."""
        ...


@dataclasses.dataclass(kw_only=True)
class CollectiveCounts:
    """The exchanges of one rank between entering and leaving `count_collectives`."""

    entries: dict[tuple[str, str], LedgerEntry] = dataclasses.field(default_factory=dict)
    """(collective, axis) to calls and bytes; filled when the block ends."""

    def calls(self, collective: str | None = None, axis: str | None = None) -> int:
        """Return how often a collective was called [count].

        Args:
            collective: Its name, such as "all_reduce"; None is any of them.
            axis: One axis of the mesh, such as "dp"; None is all of them.
        """
        return sum(entry.num_calls for entry in self._of(collective, axis))

    def tensor_bytes(self, collective: str | None = None, axis: str | None = None) -> int:
        """Return the size of the tensors handed to a collective [bytes].

        Args:
            collective: As for `calls`.
            axis: As for `calls`.
        """
        return sum(entry.tensor_bytes for entry in self._of(collective, axis))

    def sent_bytes(self, collective: str | None = None, axis: str | None = None) -> float:
        """Return what this rank sent for a collective, by the ring's count [bytes].

        Args:
            collective: As for `calls`.
            axis: As for `calls`.
        """
        return sum(entry.sent_bytes for entry in self._of(collective, axis))

    def _of(self, collective: str | None, axis: str | None) -> list[LedgerEntry]:
        return [
            entry for (name, own), entry in self.entries.items() if collective in (None, name) and axis in (None, own)
        ]


@contextlib.contextmanager
def count_collectives(model: HasLedger) -> Iterator[CollectiveCounts]:
    """Count what a block of code exchanges on this rank.

    Args:
        model: A `ParallelModel`, or anything with a ledger.

    Returns:
        Counts that are filled when the block ends.

    >>> from types import SimpleNamespace
    >>> model = SimpleNamespace(ledger=Ledger())
    >>> with count_collectives(model) as counts:
    ...     _ = model.ledger.record("all_reduce", "dp", 100, 2)
    >>> counts.calls("all_reduce"), counts.sent_bytes()
    (1, 100.0)
    """
    counts = CollectiveCounts()
    before = model.ledger.snapshot()
    try:
        yield counts
    finally:
        counts.entries = model.ledger.since(before)
