"""An imprint of memory: sums of its rows and columns, which show that one entry has changed since, which one, and from what.

What only one rank holds has no copy to be compared with. Between the end of a step and the begin of the next one nobody writes to
it but scripts, whose writes torch counts; what changes without a count is a fault of the memory, or a write to `.data`.

Memory is read as 64-bit words in rows of one length; kept are the sum of each row and of each column, modulo 2^64. One changed
word moves one row and one column by the same number: so a single change is told from several, its place is known, and the old
word is the new one minus that number. Two sums of plain words are read at the speed of the memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

__all__: list[str] = []

_WORD = 8
_COLUMNS = 2**9
"""Words of a row [count]."""
_ROW = _WORD * _COLUMNS
_SMALL = 2**16
"""Tensors below this size are put together before they are summed [bytes]."""

Named = Sequence[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Change:
    """A tensor whose bits are others than before.

    Args:
        name: Its name.
        place: The one entry that has changed, counted in memory order; None where there are several [count].
        before: That entry as it was.
        now: As it is.
        relative: By how much it has changed, relative to the tensor's largest other entry; NaN where there are several.
    """

    name: str
    place: int | None = None
    before: float = math.nan
    now: float = math.nan
    relative: float = math.nan

    @property
    def text(self) -> str:
        """What has changed, in words."""
        if self.place is None:
            return "its values changed"
        if math.isnan(self.relative):
            return f"its entry {self.place} changed"
        return f"its entry {self.place} changed from {self.before:.9g} to {self.now:.9g}"


class _MemoryRow:
    """Tensors of one dtype and device whose memory is read one after the other."""

    def __init__(self, named: Named) -> None:
        self.named = named
        self.versions = [tensor._version for _, tensor in named]
        self.places = [tensor.data_ptr() for _, tensor in named]
        self.sums = _sums_of(self._bytes())

    def _bytes(self) -> torch.Tensor:
        values = [tensor.detach().view(-1) for _, tensor in self.named]
        return (values[0] if len(values) == 1 else torch.cat(values)).view(torch.uint8)

    def changes(self) -> Iterator[Change]:
        """Yield what has changed since and was not counted by torch."""
        if any(tensor.data_ptr() != place for (_, tensor), place in zip(self.named, self.places, strict=True)):
            return  # replaced as a whole: by a script
        row = self._bytes()
        moved = [now - then for now, then in zip(_sums_of(row), self.sums, strict=True)]
        rows, columns = ([(place, by) for place, by in enumerate(sums.tolist()) if by] for sums in moved)
        counted = {index for index, (_, t) in enumerate(self.named) if t._version != self.versions[index]}
        is_one = len(rows) == len(columns) == 1 and rows[0][1] == columns[0][1]
        words = [place * _COLUMNS + column for place, _ in rows for column, _ in columns]
        start = 0
        for index, (name, tensor) in enumerate(self.named):
            own = [word for word in words if start < (word + 1) * _WORD and word * _WORD < start + tensor.nbytes]
            if own and index not in counted:
                word = row[own[0] * _WORD : (own[0] + 1) * _WORD]
                change = _entry(name, tensor, word, rows[0][1], start - own[0] * _WORD) if is_one else Change(name)
                yield from () if change is None else (change,)
            start += tensor.nbytes


class Imprint:
    """What tensors were when this was made.

    Args:
        named: (name, tensor); each contiguous, and in memory of its own.
    """

    def __init__(self, named: Named) -> None:
        small: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
        self._rows: list[_MemoryRow] = []
        for name, tensor in named:
            if tensor.nbytes >= _SMALL:
                self._rows.append(_MemoryRow([(name, tensor)]))
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append((name, tensor))
        self._rows += [_MemoryRow(members) for members in small.values()]

    def changes(self) -> list[Change]:
        """Return what has other bits than when this was made, though torch has counted no write to it."""
        return [change for row in self._rows for change in row.changes()]


def _sums_of(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of a row of bytes as a table of words: of its rows and of its columns."""
    even = row.numel() // _ROW * _ROW
    whole, rest = row[:even], row.new_zeros(_ROW)
    rest[: row.numel() - even] = row[even:]
    if whole.storage_offset() % _WORD or whole.data_ptr() % _WORD:
        whole = whole.clone()
    table, last = whole.view(torch.int64).view(-1, _COLUMNS), rest.view(torch.int64)
    return torch.cat([table.sum(1), last.sum().view(1)]).cpu(), (table.sum(0) + last).cpu()


def _entry(name: str, tensor: torch.Tensor, word: torch.Tensor, moved: int, offset: int) -> Change | None:
    """Return which entry of a tensor the changed word is; None where it is none of this tensor's.

    Args:
        name: The tensor's name.
        tensor: The tensor.
        word: The word as it is, as bytes.
        moved: What it has moved by, modulo 2^64.
        offset: Where the tensor begins, from the word's begin [bytes].
    """
    padded = torch.zeros(_WORD, dtype=torch.uint8)
    padded[: word.numel()] = word.cpu()
    before = (padded.view(torch.int64) - moved).view(torch.uint8)
    size = tensor.element_size()
    for start in range(0, _WORD, min(size, _WORD)):
        entry = (start - offset) // size
        if torch.equal(padded[start : start + size], before[start : start + size]) or not 0 <= entry < tensor.numel():
            continue
        if size > _WORD or tensor.is_complex() or not tensor.is_floating_point():
            return Change(name, place=entry)
        old = before[start : start + size].view(tensor.dtype).item()
        new = padded[start : start + size].view(tensor.dtype).item()
        return _of_entry(name, tensor, entry, old, new)
    return None


def change_of(name: str, now: torch.Tensor, before: torch.Tensor) -> Change | None:
    """Return how a tensor has changed, by a copy from before; None where its bits are the same."""
    size = now.element_size()
    odd = (now.view(torch.uint8) != before.view(torch.uint8)).view(-1, size).any(1).nonzero().view(-1).tolist()
    if len(odd) != 1 or not now.is_floating_point():
        return Change(name, odd[0] if len(odd) == 1 else None) if odd else None
    return _of_entry(name, now, odd[0], before[odd[0]].item(), now[odd[0]].item())


def _of_entry(name: str, tensor: torch.Tensor, entry: int, old: float, new: float) -> Change:
    others = tensor.detach().reshape(-1).to("cpu", torch.float64, copy=True)
    others[entry] = 0.0
    largest = max(others.abs().max().item(), abs(old)) or 1.0
    return Change(name, entry, old, new, abs(new - old) / largest)
