"""Attachment of a group's ranks to one shared segment, on all of them or on none.

The segment is an anonymous file of rank 0 (memfd). It has no name in any file system, so nothing can be left behind, and the size
of /dev/shm does not matter. Other ranks open it through /proc/<pid>/fd, which the kernel allows for the same user only.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.comm.shm.build import BuildError, load_extension
from meshwright.host import process_numbers_place

if TYPE_CHECKING:
    # Documented as torch.distributed's own, though its stubs do not say so.
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

__all__: list[str] = []

MAX_RANKS = 64  # kMaxRanks in csrc/segment.h
# Two slots a rank. Of 64 KiB to 2 MiB this size is the fastest at 1 to 97 MiB, with two and four ranks; measured in
# benchmarks/transport. Pages that are never touched take no memory.
_SLOT_BYTES = 1024 * 1024
_RING_BYTES = 1024 * 1024
_SMALL_RING_BYTES = 128 * 1024
_MANY_RANKS = 8  # the rings of all pairs grow with the square
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing: a mapped page can never vanish


class CannotAttachError(Exception):
    """The group gets no segment. `is_expected` if that is not a fault, since its ranks are on several hosts."""

    def __init__(self, reason: str, *, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_expected = is_expected


@dataclasses.dataclass(frozen=True)
class Attached:
    """A segment and its ranks: `process_files` are pidfds by group rank, -1 for this one."""

    extension: Any
    segment: Any
    process_files: list[int]


@dataclasses.dataclass(frozen=True)
class _Card:
    """A rank's description for the others."""

    place: str  # host, process namespace and user
    pid: int
    problem: str = ""
    file: int = -1
    nonce: int = 0


def attach(
    store: Store, rank: int, global_ranks: Sequence[int], wait_at_most: datetime.timedelta | None = None
) -> Attached:
    """Return the group's segment; every rank of the group calls this, and all succeed or none does.

    Args:
        store: The group's store.
        rank: This process's rank in the group.
        global_ranks: Global ranks by group rank.
        wait_at_most: For one rank; None: the store's own timeout.

    Raises:
        CannotAttachError: On every rank, with one reason.
        RuntimeError: A rank did not come within that time, or the store is gone; the text names the rank.
    """
    size = len(global_ranks)
    # A store may outlive a group and see another of the same name, under torchrun for example: what is left of the first is
    # not of the second. Each rank counts for itself, since all of them make the same groups.
    life = store.add(f"shm/lives/{rank}", 1)
    extension, file, segment, problem = None, -1, None, ""
    nonce = secrets.randbits(63)
    shape = {
        "rank": rank,
        "num_ranks": size,
        "slot_bytes": _SLOT_BYTES,
        "ring_bytes": _RING_BYTES if size <= _MANY_RANKS else _SMALL_RING_BYTES,
    }
    try:
        extension = load_extension()
        if rank == 0:
            file = os.memfd_create("meshwright", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            segment = extension.Segment(file=file, nonce=nonce, create=True, **shape)
            fcntl.fcntl(file, _F_ADD_SEALS, _SEALS)
    except (BuildError, RuntimeError, OSError) as error:
        problem = str(error)
    process_files: list[int] = []
    try:
        own = _Card(_place(), os.getpid(), problem, file, nonce)
        cards = _exchange(store, f"{life}/card", rank, global_ranks, own, wait_at_most=wait_at_most)
        _refuse(cards, global_ranks)
        problem = ""
        try:
            for peer, card in enumerate(cards):
                process_files.append(-1 if peer == rank else os.pidfd_open(card.pid))
            if segment is None and extension is not None:
                segment = _open(extension, cards[0], shape)
        except (RuntimeError, OSError) as error:
            problem = f"rank {global_ranks[rank]} cannot reach the segment of rank {global_ranks[0]}: {error}"
        own = _Card("", 0, problem)
        problems = _exchange(store, f"{life}/attached", rank, global_ranks, own, wait_at_most=wait_at_most)
        _refuse(problems, None)
    except BaseException:
        for each in process_files:
            if each >= 0:
                os.close(each)
        raise
    finally:
        if file >= 0:
            os.close(file)  # the mappings keep the memory; no other process can attach from here on
    return Attached(extension, segment, process_files)


def _open(extension: Any, card: _Card, shape: dict[str, int]) -> Any:
    file = os.open(f"/proc/{card.pid}/fd/{card.file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return extension.Segment(file=file, nonce=card.nonce, create=False, **shape)
    finally:
        os.close(file)


def _exchange(
    store: Store,
    name: str,
    rank: int,
    global_ranks: Sequence[int],
    card: _Card,
    *,
    wait_at_most: datetime.timedelta | None,
) -> list[_Card]:
    store.set(f"shm/{name}/{rank}", json.dumps(dataclasses.asdict(card)))
    cards = []
    for peer, global_rank in enumerate(global_ranks):
        key = f"shm/{name}/{peer}"
        try:
            if wait_at_most is not None:
                store.wait([key], wait_at_most)
            cards.append(_Card(**json.loads(store.get(key))))
        except RuntimeError as error:
            raise type(error)(f"rank {global_rank} did not come to a group of {len(global_ranks)}: {error}") from error
    return cards


def _refuse(cards: Sequence[_Card], global_ranks: Sequence[int] | None) -> None:
    for card in cards:
        if card.problem:
            raise CannotAttachError(card.problem)
    if global_ranks is None:
        return
    if len(cards) > MAX_RANKS:
        raise CannotAttachError(f"a segment holds at most {MAX_RANKS} ranks, the group has {len(cards)}")
    for peer, card in enumerate(cards):
        if card.place != cards[0].place:
            raise CannotAttachError(
                f"ranks {global_ranks[0]} and {global_ranks[peer]} are on different hosts, in different containers, or "
                "of different users",
                is_expected=True,
            )


def _place() -> str:
    """Return the kernel, process namespace and user, which two processes must share to open each other's files."""
    return f"{os.getuid()}/{process_numbers_place() or secrets.token_hex(8)}"
