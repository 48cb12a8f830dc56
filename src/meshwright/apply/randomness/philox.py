"""Philox 4x32-10, a counter-based generator (Salmon et al. 2011, doi:10.1145/2063384.2063405), over places of elements.

Counter-based: a number is a function of a key and a counter, so that any rank computes the numbers of any part of a tensor. Here
the counter is (index // 4, plane, sample), and `index % 4` chooses one of its four words. The torch operators below compute the
same bits as `csrc/philox.cpp`, on every device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

__all__: list[str] = []

NO_SAMPLE: Final = 2**63 - 1
"""The sample of numbers that all samples share."""

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS: Final = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One of the nested loops over a tensor's elements."""

    count: int
    """Its entries [count]."""
    sample: int
    """By how much each entry moves the sample."""
    index: int
    """By how much each entry moves the index within the sample."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Places of rows that lie in any order.

    Args:
        samples: Each row's sample: contiguous int64, one dim.
        indices: By how much the index of its first element is moved: the like.
    """

    samples: Tensor
    indices: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class ElementPlace:
    """Samples and indices of a tensor's elements, in the order of a contiguous tensor.

    Args:
        key: 64 bits.
        levels: Loops over the elements, the innermost last; with `rows` those of a row.
        first_sample: The sample of the first element.
        first_index: Its index within the sample.
        rows: Rows in any order, whose samples stand for the first one's.
    """

    key: int
    levels: tuple[Level, ...]
    first_sample: int = 0
    first_index: int = 0
    rows: RowPlaces | None = dataclasses.field(default=None, compare=False)

    @property
    def count(self) -> int:
        """Elements [count]."""
        total = 1 if self.rows is None else len(self.rows.samples)
        for level in self.levels:
            total *= level.count
        return total


INDEX_BITS = 58
"""Of an element's index within its sample: a counter of 2**56 blocks of four words [bits]."""
_DIM_BITS = {2: 24, 3: 16, 4: 13, 5: 10, 6: 8}
"""Of an index along a dim that is not the outermost, by the number of dims [bits]."""


def index_strides(sizes: Sequence[int]) -> list[int]:
    """Return by how much an entry of each dim moves an element's index, for the dims beside that of the samples.

    No stride depends on a size, unless one is beyond its bits: a tensor that is padded or cut to another length has the same
    numbers where both have entries.

    >>> index_strides([3, 5]) == index_strides([3, 7]) == [2**24, 1]
    True
    """
    bits = _DIM_BITS.get(len(sizes), 0)
    outer = INDEX_BITS - bits * (len(sizes) - 1)
    if bits and sizes[0] <= 1 << outer and all(size <= 1 << bits for size in sizes[1:]):
        return [1 << bits * place for place in reversed(range(len(sizes)))]
    return [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]


def merge_levels(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Return the same loops in as few levels as possible: long runs of consecutive elements are fast."""
    merged: list[Level] = []
    for level in levels:
        if level.count == 1:
            continue
        outer = merged[-1] if merged else None
        if outer is not None and (outer.sample, outer.index) == (level.count * level.sample, level.count * level.index):
            merged[-1] = Level(outer.count * level.count, level.sample, level.index)
        else:
            merged.append(level)
    return tuple(merged) or (Level(1, 0, 1),)


def key_of(text: str) -> int:
    """Return 64 bits that a text alone decides."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Return the four words of each counter.

    Args:
        counter: Four int64 tensors of one shape, with values below 2**32.
        key: Two numbers below 2**32.

    Returns:
        Four int64 tensors with values below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps to the same 64 bits
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def words_at(place: ElementPlace, plane: int, device: torch.device) -> Tensor:
    """Return the word of each element: int64, values below 2**32, one dim.

    Args:
        place: The elements.
        plane: 0, or 1 for a second word of each.
        device: Where they are computed.
    """
    shape = tuple(level.count for level in place.levels)
    sample = torch.full((), place.first_sample, dtype=torch.int64, device=device)
    index = torch.full((), place.first_index, dtype=torch.int64, device=device)
    for dim, level in enumerate(place.levels):
        along = torch.arange(level.count, device=device).reshape([-1] + [1] * (len(shape) - dim - 1))
        sample, index = sample + along * level.sample, index + along * level.index
    if place.rows is not None:
        sample, index = (
            given.to(device).reshape([-1] + [1] * len(shape)) + own
            for given, own in ((place.rows.samples, sample - place.first_sample), (place.rows.indices, index))
        )
        shape = (len(place.rows.samples), *shape)
    sample, index = sample.expand(shape).reshape(-1), index.expand(shape).reshape(-1)
    block = index >> 2
    counter = [block & _MASK, (block >> 32) | (plane << 24), sample & _MASK, sample >> 32 & _MASK]
    words = torch.stack(philox(counter, (place.key & _MASK, place.key >> 32)), dim=1)
    return words.gather(1, (index & 3)[:, None])[:, 0]


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape as plain numbers."""
    return tuple(map(int, tensor.shape))
