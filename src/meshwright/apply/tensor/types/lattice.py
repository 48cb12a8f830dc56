"""Lattice of tensor types over the ranks of a tensor-parallel group."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import Tensor

__all__: list[str] = []

Kind = Literal["replicated", "varying", "partial", "shard"]


@dataclasses.dataclass(frozen=True, slots=True)
class Type:
    """Relation of the ranks' tensors to the whole one.

    replicated   every rank has the whole tensor; its gradient is either the same on all ranks or a term (`gradients.py`)
    shard(dim)   every rank has a part along a dim; its gradient is a shard, too
    partial      the ranks' tensors add up to the whole one; its gradient is the same on all ranks
    varying      differs from rank to rank, and its relation to the whole is not known
    """

    kind: Kind
    dim: int | None = None
    is_zero: bool = False
    """Of a replicated tensor: a constant of zeros, which may be taken for a term of a sum, too."""

    def __str__(self) -> str:
        return f"shard({self.dim})" if self.kind == "shard" else self.kind


REPLICATED = Type("replicated")
ZERO = Type("replicated", is_zero=True)
VARYING = Type("varying")
PARTIAL = Type("partial")


def shard(dim: int) -> Type:
    """Return the type of shards along a dim, counted from 0."""
    return Type("shard", dim)


class RefusedError(Exception):
    """An operation on these types does not compute what one device computes; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = Where("", 0)


@dataclasses.dataclass(slots=True, eq=False)
class Typed:
    """One version of a tensor: a write in place makes a new one."""

    tensor: Tensor
    type: Type
    full: tuple[int, ...]
    """The whole tensor's shape."""
    name: str = ""
    """The FQN of a parameter or buffer, or the function that made it."""
    where: Where = NOWHERE
    gradients: set[str] = dataclasses.field(default_factory=set[str])
    """What its gradient consists of: "same" on all ranks, a "term" of a sum, its "own" part (`gradients.py`)."""
