"""Check of the batches that ranks share out: `split_batch` and ready-made batches of `make_loader` are the same on all ranks.

Each rank keeps its rows of what it was given. Ranks with other batches would train on some rows twice and leave others out, and
nothing would fail. The digests of all batches since the last agreement travel with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.run.sentinels.digest import digest_batch, digest_text, named_tensors

__all__: list[str] = []

_MOST_MARKS = 64
"""Batches since the last agreement whose samples are kept [count]."""
_SAMPLES = 1024
"""Values of a tensor that decide whether a difference is a rounding [count]."""
_ROUNDING = 1e-4
"""Difference of sums over a tensor's values that is taken for rounding [fraction of the sum of their sizes]."""
_FIRST = 16
"""Batches that are read in any case [count]."""
_THEN = 8
"""After them one of so many is read; on a device one of a hundred, since reading waits for it [count]."""
_FIX = (
    "give every rank the same global batch: seed what draws it alike on all ranks (torch.manual_seed(step), say), and leave a "
    "DistributedSampler, or another share by rank, out; where each rank has data of its own, step on it without split_batch, or "
    "use make_loader(..., rank_local=True)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What is kept of a global batch: its digest, and some values of each tensor, in one order on all ranks."""

    digest: int
    values: tuple[tuple[str, str, torch.Tensor], ...]


class SharedBatches:
    """Marks of the global batches that this rank has shared out since ranks last agreed."""

    def __init__(self) -> None:
        self.is_watching = False
        """Whether anybody compares: with one share there is nothing to."""
        self._marks: list[Mark] = []
        self._told: list[Mark] = []
        self._count = self._digest = self._seen = 0

    def mark(self, batch: Any) -> Mark | None:
        """Return what is compared of a global batch; None where nobody compares."""
        if not self.is_watching or batch is None:
            return None
        tensors = [(name, tensor.detach()) for name, tensor in named_tensors(batch)]
        self._seen += 1
        every = _THEN if all(tensor.device.type == "cpu" for _, tensor in tensors) else 100
        if self._seen > _FIRST and self._seen % every:
            return Mark(0, ())
        values = tuple((name, f"{tuple(t.shape)} {t.dtype}", _some(t)) for name, t in tensors)
        kinds = digest_text("".join(kind for _, kind, _ in values))
        return Mark(digest_batch([some for _, _, some in values], whole=True) ^ kinds or 1, values)

    def take(self, mark: Mark | None) -> None:
        """Take note that the batch of a mark is trained on next."""
        if mark is None:
            return
        self._count += 1
        self._digest = digest_text(f"{self._digest} {mark.digest}")
        self._marks = [*self._marks[1 - _MOST_MARKS :], mark]

    def digest(self) -> int:
        """Return the digest of all batches since the last call, which begins anew."""
        told = digest_text(f"{self._count} {self._digest}") if self._count else 0
        self._told, self._marks, self._count, self._digest = self._marks, [], 0, 0
        return told

    def raise_different(self, group: Communicator, device: torch.device) -> bool:
        """Raise ApplyError on every rank where ranks have shared out different batches; every rank calls it.

        Returns:
            Whether some batches differ by roundings alone. Nothing is compared where a rank has shared out fewer than another.
        """
        mine = [
            [mark.digest, *[[name, kind, *_sums(values)] for name, kind, values in mark.values]] for mark in self._told
        ]
        told = group.all_gather_json(mine, device=device)
        are_rounded = False
        if len({len(rows) for rows in told}) > 1:
            return False
        for rank, theirs in zip(group.ranks, told, strict=True):
            for first, other in zip(told[0], theirs, strict=True):
                if 0 in (first[0], other[0]) or first[0] == other[0]:
                    continue
                if (what := _difference(first[1:], other[1:])) is not None:
                    raise ApplyError(
                        "ranks were given different batches to share out, by split_batch or make_loader: "
                        f"on ranks {group.ranks[0]} and {rank} {what} (rule: each rank takes its rows of one global batch)",
                        fix=_FIX,
                    )
                are_rounded = True
        return are_rounded


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of some of a tensor's values, spread over all of it; a tensor without a row of memory gives none."""
    if tensor.layout != torch.strided or tensor.is_nested or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return torch.zeros(0)
    row = tensor.reshape(-1)
    return row.clone() if row.numel() <= _SAMPLES else row[:: row.numel() // _SAMPLES | 1].clone()


def _sums(values: torch.Tensor) -> list[float]:
    """Return the sum of values, of their sizes, and of both by place; of integers exact, since they are few."""
    if not values.numel():
        return [0.0, 0.0, 0.0]
    parts = torch.view_as_real(values).flatten() if values.is_complex() else values
    row = torch.nan_to_num(parts.double())
    places = torch.linspace(1.0, 2.0, row.numel(), dtype=torch.float64, device=row.device)
    return [row.sum().item(), row.abs().sum().item(), (row * places).sum().item()]


def _difference(mine: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    """Return in what two batches differ by more than roundings, or None."""
    if [row[0] for row in mine] != [row[0] for row in theirs]:
        return (
            f"they hold other tensors: {', '.join(row[0] for row in mine)}, and {', '.join(row[0] for row in theirs)}"
        )
    for (name, kind, *sums), (_, other_kind, *others) in zip(mine, theirs, strict=True):
        shown = f"batch{name}" if name.startswith("[") else name
        if kind != other_kind:
            return f"{shown} is {kind}, and {other_kind}"
        allowed = _ROUNDING * max(sums[1], others[1]) if "float" in kind or "complex" in kind else 0.0
        if any(abs(a - b) > allowed for a, b in zip(sums, others, strict=True)):
            return f"{shown} has other values"
    return None
