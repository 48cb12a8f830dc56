"""Ledger: every byte that this rank exchanges, by collective and axis."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Final

from meshwright.comm.spans import Details, Spanning, SpanRecorder

__all__: list[str] = []


def ring_bytes(collective: str, tensor_bytes: int, num_ranks: int) -> float:
    """Return the bytes that one rank sends for a ring collective.

    Args:
        collective: "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "send", "receive" or "to".
        tensor_bytes: Bytes of the full tensor on one rank [bytes]; for an all-gather, of the gathered result.
        num_ranks: Ranks that take part, n >= 1 [count].

    Returns:
        Bytes sent by one rank, averaged over the ranks [bytes].

    Source:
        Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002: 2 (n - 1) / n of the tensor for an all-reduce, which is a
        reduce-scatter and an all-gather of (n - 1) / n each.

    >>> ring_bytes("all_reduce", 8, 4)
    12.0
    """
    return tensor_bytes * _ring_factor(collective, num_ranks)


_RING_FACTOR: dict[str, Callable[[float], float]] = {
    "all_reduce": lambda share: 2 * share,
    "reduce_scatter": lambda share: share,
    "all_gather": lambda share: share,
    "broadcast": lambda share: share,
    "reduce": lambda share: share,
    "all_to_all": lambda share: share,
    "send": lambda _: 1.0,  # point to point: the whole tensor leaves this rank
    "receive": lambda _: 0.0,
    "to": lambda _: 1.0,  # a move between two devices of one process
    "barrier": lambda _: 0.0,
}


@functools.cache
def _ring_factor(collective: str, num_ranks: int) -> float:
    return _RING_FACTOR[collective]((num_ranks - 1) / num_ranks)


_NOTHING: Final = contextlib.nullcontext()


@dataclasses.dataclass(slots=True)
class LedgerEntry:
    """Total cost of one kind of exchange on one axis."""

    num_calls: int = 0
    """Times it was called [count]."""
    tensor_bytes: int = 0
    """Bytes of the tensors handed in [bytes]."""
    sent_bytes: float = 0.0
    """Bytes that this rank sent, by the ring's count [bytes]."""
    wait_s: float = 0.0
    """Time the calling thread stood still for it: the part that no computation hides [s]."""

    def minus(self, earlier: LedgerEntry) -> LedgerEntry:
        """Return the difference from `earlier`."""
        return LedgerEntry(
            self.num_calls - earlier.num_calls,
            self.tensor_bytes - earlier.tensor_bytes,
            self.sent_bytes - earlier.sent_bytes,
            self.wait_s - earlier.wait_s,
        )


@dataclasses.dataclass(slots=True)
class Ledger:
    """Counts of every exchange of this rank, keyed by (collective, axis)."""

    entries: dict[tuple[str, str], LedgerEntry] = dataclasses.field(default_factory=dict)
    """(collective, axis) -> what that exchange has cost so far."""
    checks: dict[tuple[str, str], LedgerEntry] = dataclasses.field(default_factory=dict)
    """The same of checks of the numbers, which come in some steps and belong to no step's formula."""
    recorder: SpanRecorder | None = None
    """Records what this rank does, in the steps that are traced; None in all others."""
    aside: int = 0
    """Contexts in which exchanges count as checks [count]."""

    @contextlib.contextmanager
    def of_checks(self) -> Iterator[None]:
        """Count exchanges inside the context as checks."""
        self.aside += 1
        try:
            yield
        finally:
            self.aside -= 1

    @property
    def is_aside(self) -> bool:
        """Whether exchanges count as checks now."""
        return self.aside > 0

    def span(self, kind: str, name: object, details: Details = None) -> contextlib.AbstractContextManager[object]:
        """Return a context whose time is recorded where steps are traced, and which does nothing elsewhere.

        Args:
            kind: As for `SpanRecorder.add`.
            name: As for `SpanRecorder.add`.
            details: What it tells.
        """
        return _NOTHING if self.recorder is None else Spanning(self.recorder, kind, name, details)

    def record(self, collective: str, axis: str, tensor_bytes: int, num_ranks: int) -> LedgerEntry:
        """Count one call and return its entry, to which the caller adds the time it waits.

        Args:
            collective: As for `ring_bytes`.
            axis: The axis of the mesh that it goes along, such as "dp".
            tensor_bytes: Size of the tensor [bytes].
            num_ranks: Ranks that take part [count].
        """
        entries = self.checks if self.aside else self.entries
        entry = entries.get((collective, axis))
        if entry is None:
            entry = entries[(collective, axis)] = LedgerEntry()
        entry.num_calls += 1
        entry.tensor_bytes += tensor_bytes
        entry.sent_bytes += ring_bytes(collective, tensor_bytes, num_ranks)
        return entry

    def snapshot(self) -> dict[tuple[str, str], LedgerEntry]:
        """Return a copy of the entries, for a later difference."""
        return {key: dataclasses.replace(entry) for key, entry in self.entries.items()}

    def since(self, snapshot: dict[tuple[str, str], LedgerEntry]) -> dict[tuple[str, str], LedgerEntry]:
        """Return the exchanges since a snapshot; kinds that did not happen are left out."""
        nothing = LedgerEntry()
        differences = {key: entry.minus(snapshot.get(key, nothing)) for key, entry in self.entries.items()}
        return {key: entry for key, entry in differences.items() if entry.num_calls}

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sent so far [bytes]."""
        return sum(entry.sent_bytes for entry in self.entries.values())

    @property
    def wait_s(self) -> float:
        """Time for which this rank's computing thread has waited for exchanges so far [s]."""
        return sum(entry.wait_s for entry in self.entries.values())
