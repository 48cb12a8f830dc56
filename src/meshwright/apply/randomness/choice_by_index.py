"""One choice of rows by an index: which rows it has chosen, and which of them a tensor holds."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__: list[str] = []


@dataclasses.dataclass(slots=True)
class ChosenByIndex:
    """Rows that an index has chosen.

    Args:
        name: The module whose code chose them.
        indices: An integer for each row, of each dim that was indexed; or one mask.
        sizes: The entries of these dims [count].
        num_rows: Rows that were chosen [count].
        memory: Of the chosen rows.
        begin: Where the first of them begins there [elements].
        stride: From one to the next [elements].
        versions: Of the indices, by which a later write is known.
        among: The choice that has made the rows among which this one chooses.
        is_unclear: Whether it may choose among rows that an earlier choice has left, and nothing shows it.
        is_packed: Whether torch has packed sequences: step by step, in the order in which their samples lie.
        dim: Of the tensor and of what is chosen, which held the rows; None where torch's own code chose.
    """

    name: str
    indices: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    num_rows: int
    memory: StorageWeakRef
    begin: int
    stride: int
    versions: tuple[int, ...]
    among: ChosenByIndex | None = None
    is_unclear: bool = False
    is_packed: bool = False
    dim: int | None = None
    found: Tensor | None = None

    @property
    def num_sources(self) -> int:
        """Rows among which they were chosen, or those that these were chosen from [count]."""
        return math.prod(self.sizes) if self.among is None else self.among.num_sources

    @property
    def is_in_order(self) -> bool:
        """Whether it has chosen each row, in their order."""
        if self.num_rows != self.num_sources or not self.is_unchanged:
            return False
        sources = self.sources()
        return torch.equal(sources, torch.arange(len(sources), device=sources.device))

    @property
    def is_ascending(self) -> bool:
        """Whether it has chosen rows in their order, or in that of packed sequences."""
        if self.is_packed:
            return True
        sources = self.sources()
        return bool((sources[1:] > sources[:-1]).all())

    @property
    def is_unchanged(self) -> bool:
        """Whether the index still has the values by which it chose."""
        is_same = self.versions == tuple(index._version for index in self.indices)
        return is_same and (self.among is None or self.among.is_unchanged)

    def sources(self) -> Tensor:
        """Return the place of each row among those that were there to choose: int64, one dim."""
        if self.found is None:
            first, *others = self.indices
            if first.dtype == torch.bool:
                self.found = first.flatten().nonzero()[:, 0]
            else:
                places = first.long() % self.sizes[0]
                for index, size in zip(others, self.sizes[1:], strict=True):
                    places = places * size + index.long() % size
                self.found = places
            if self.among is not None:
                self.found = self.among.sources()[self.found]
        return self.found

    def is_like(self, other: ChosenByIndex) -> bool:
        """Tell whether another choice of as many rows has chosen the same ones."""
        return self is other or (
            self.num_sources == other.num_sources
            and self.is_unchanged
            and other.is_unchanged
            and torch.equal(self.sources(), other.sources())
        )

    def rows_in(self, given: Tensor) -> slice | None:
        """Return which of the chosen rows a tensor holds, as parts of them do that are split off; None: it is another tensor."""
        if not given.dim() or self.memory.expired() or StorageWeakRef(given.untyped_storage()) != self.memory:
            return None
        first, rest = divmod(int(given.storage_offset()) - self.begin, max(1, self.stride))
        is_in_order = rest == 0 and (given.stride(0) == self.stride or len(given) == 1)
        fits = is_in_order and 0 <= first <= first + len(given) <= self.num_rows
        return slice(first, first + len(given)) if fits else None
