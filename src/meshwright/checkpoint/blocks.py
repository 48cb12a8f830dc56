"""Digests of a file by blocks, so that a rank that reads a part of a file has to check that part alone.

xxh3 with 128 bits finds every damage that chance makes, at the speed of memory; it is no protection against forgery. Source:
https://github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from meshwright.checkpoint.durable import fill_from
from meshwright.errors import CheckpointError

__all__: list[str] = []

BLOCK_BYTES = 4 * 2**20
DIGEST_BYTES = 16
_PIECE_BYTES = 2**19


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the digest of these bytes.

    >>> digest_of(b"").hex()
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_digest(data)


class Digesting:
    """Passes a file's contents on, and makes the digests of its blocks.

    Args:
        parts: The contents, in order.
    """

    def __init__(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        self._parts = parts
        self._block = xxhash.xxh3_128()
        self._fill = 0
        self._digests = bytearray()

    def __iter__(self) -> Iterator[memoryview]:
        for part in self._parts:
            rest = memoryview(part).cast("B")
            while rest:
                # So small that it is still in the processor's cache when it is written.
                most = min(_PIECE_BYTES, BLOCK_BYTES - self._fill)
                piece, rest = rest[:most], rest[most:]
                yield piece
                # Once it is written: of memory that changes in between, the digest is that of the new values, and not of both.
                self._block.update(piece)
                self._fill += len(piece)
                if self._fill == BLOCK_BYTES:
                    self._end_block()

    def _end_block(self) -> None:
        self._digests += self._block.digest()
        self._block, self._fill = xxhash.xxh3_128(), 0

    def table(self) -> bytes:
        """Return the digests of all blocks, one after the other; called when all has passed."""
        if self._fill:
            self._end_block()
        return bytes(self._digests)


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks of a file of this size."""
    return -(-num_bytes // BLOCK_BYTES)


def check_blocks(path: Path, descriptor: int, table: bytes, numbers: Iterable[int]) -> None:
    """Compare blocks of a file with their digests.

    Args:
        path: The file, for messages.
        descriptor: The open file.
        table: `Digesting.table` of it.
        numbers: Which blocks.

    Raises:
        CheckpointError: A block differs; the message names file, place and both digests.
        StorageError: It cannot be read.
    """
    memory = memoryview(bytearray(min(_PIECE_BYTES, BLOCK_BYTES)))
    for number in numbers:
        start = number * BLOCK_BYTES
        block, size = xxhash.xxh3_128(), 0
        while size < BLOCK_BYTES:
            filled = fill_from(path, descriptor, start + size, memory[: BLOCK_BYTES - size])
            block.update(memory[:filled])
            size += filled
            if filled < len(memory):
                break
        expected, found = table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES], block.digest()
        if found != expected:
            raise CheckpointError(
                f"{path} is damaged in bytes {start} to {start + size}: digest {found.hex()}, expected {expected.hex()}",
                fix="load another step, or copy this one again from where it came from",
            )
