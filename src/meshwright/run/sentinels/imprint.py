"""Imprint of memory: sums of its rows and columns, which show a changed entry, its place and its old value.

Tensors that only one rank holds have no copy to compare with. Between two steps only scripts write to them, and torch counts
those writes. A change without a count is a memory fault, or a write to `.data`.

Memory is read as 64-bit words in rows of one length; the imprint keeps the sum of each row and of each column, modulo 2^64. One
changed word moves one row and one column by the same number. That distinguishes a single change from several, gives its place,
and gives the old word: the new one minus that number. Both sums are computed at memory speed.
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
    """A tensor whose bits have changed.

    Args:
        name: Its name.
        place: Index of the changed entry, in memory order; None where there are several [count].
        before: Its old value.
        now: Its new value.
        relative: Its change relative to the tensor's largest other entry; NaN where there are several.
    """

    name: str
    place: int | None = None
    before: float = math.nan
    now: float = math.nan
    relative: float = math.nan

    @property
    def text(self) -> str:
        """The change, in words."""
        if self.place is None:
            return "its values changed"
        if math.isnan(self.relative):
            return f"its entry {self.place} changed"
        return f"its entry {self.place} changed from {self.before:.9g} to {self.now:.9g}"


class _MemoryRow:
    """Tensors of one dtype and device whose memory is read in sequence."""

    def __init__(self, named: Named) -> None:
        self.named = named
        self.versions = [tensor._version for _, tensor in named]
        self.places = [tensor.data_ptr() for _, tensor in named]
        self.sums = _sums_of(self._bytes())

    def _bytes(self) -> torch.Tensor:
        values = [tensor.detach().view(-1) for _, tensor in self.named]
        return (values[0] if len(values) == 1 else torch.cat(values)).view(torch.uint8)

    def changes(self) -> Iterator[Change]:
        """Yield the changes since that torch has not counted."""
        if any(tensor.data_ptr() != place for (_, tensor), place in zip(self.named, self.places, strict=True)):
            return  # replaced by a script
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
    """The imprint of some tensors.

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
        """Return the tensors whose bits have changed since, though torch has counted no write."""
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
    """Return the entry of a tensor to which the changed word belongs; None where it is not in this tensor.

    Args:
        name: The tensor's name.
        tensor: The tensor.
        word: The word's present value, as bytes.
        moved: Its change, modulo 2^64.
        offset: Begin of the tensor, relative to the word's [bytes].
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
    """Return the change of a tensor since a copy of it was made; None where its bits are the same."""
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
