"""Ranks of a job on this host, whose processes' ends are seen at once; of other hosts' ranks the store tells."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshwright.host import process_numbers_place

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

__all__: list[str] = []

_PLACE_KEY = "process"
"""Before the rank's number: its process, and where that number holds."""


class Neighbours:
    """The processes of some other ranks, as far as they are of this host.

    Where the system has no descriptors of processes (Linux has, from 5.3 on), none is seen.

    Args:
        store: The job's store.
        rank: This rank.
        candidates: Ranks that may be of this host; one of another host does no harm.
    """

    def __init__(self, store: Store, rank: int, candidates: Iterable[int]) -> None:
        self._store = store
        self._rank = rank
        self._unknown = [other for other in candidates if other != rank]
        self._descriptors: dict[int, int] = {}
        """Descriptor -> rank."""
        self._place = process_numbers_place() if hasattr(os, "pidfd_open") else ""
        if self.sees:
            self._poll = select.poll()
            self._wake = os.pipe()
            self._poll.register(self._wake[0], select.POLLIN)

    @property
    def sees(self) -> bool:
        """Whether this system shows ends of processes."""
        return bool(self._place)

    def tell(self) -> None:
        """Tell where this rank's process is."""
        if self._place:
            self._store.set(f"{_PLACE_KEY}/{self._rank}", json.dumps([self._place, os.getpid()]))

    def find(self) -> list[int]:
        """Look for ranks that have told where they are since the last call; return which of them have ended already."""
        ended: list[int] = []
        for rank in self._unknown if self._place else ():
            if not self._store.check([f"{_PLACE_KEY}/{rank}"]):
                continue
            self._unknown = [other for other in self._unknown if other != rank]
            place, pid = json.loads(self._store.get(f"{_PLACE_KEY}/{rank}"))
            if place == self._place and not self._open(rank, int(pid)):
                ended.append(rank)
        return ended

    def _open(self, rank: int, pid: int) -> bool:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except OSError:  # no descriptors left, or no such call: the store tells, later
            return True
        self._descriptors[descriptor] = rank
        self._poll.register(descriptor, select.POLLIN)
        return True

    def look(self, limit_s: float = 0.0) -> list[int]:
        """Return which ranks' processes have ended since the last call. Where none can be seen nobody may ask.

        Args:
            limit_s: How long to wait for one, or for `wake` [s].
        """
        ready = {descriptor for descriptor, _ in self._poll.poll(1000 * limit_s)}
        found = [rank for descriptor, rank in self._descriptors.items() if descriptor in ready]
        for descriptor in ready - {self._wake[0]}:
            del self._descriptors[descriptor]
            self._poll.unregister(descriptor)
            os.close(descriptor)
        return found

    def knows(self, rank: int) -> bool:
        """Tell whether a rank's process is seen here, and has not ended."""
        return rank in self._descriptors.values()

    def kill(self, rank: int) -> None:
        """Kill a rank's process, if it is seen here."""
        for descriptor, known in tuple(self._descriptors.items()):
            if known == rank:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def wake(self) -> None:
        """End a `look` of another thread; there is no use in one afterwards."""
        if self.sees:
            os.write(self._wake[1], b"!")

    def close(self) -> None:
        """Close what this holds open; nobody looks any more."""
        if self.sees:
            for descriptor in (*self._wake, *self._descriptors):
                os.close(descriptor)
            self._place = ""
