"""Report of the type check."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection

from meshwright.apply.tensor.types.lattice import NOWHERE, Where

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An operation that does not compute on shards what one device computes."""

    operation: str
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f" at {_short(self.file)}:{self.line}" if self.file else ""
        return f"types: {self.operation}{place} {self.text}"


@dataclasses.dataclass
class TypeReport:
    """Result of the type check of one run.

    Attributes:
        refusals: Operations that forbid the cut, and where; the check ends at the first.
        compared_sizes: Lines that compare a size of a sharded dim with a number: other sizes may take another path.
        partial: FQNs of parameters that are whole, and whose gradients are terms of a sum.
        num_operations: Calls that the check has followed [count].
    """

    refusals: list[Refusal] = dataclasses.field(default_factory=list[Refusal])
    compared_sizes: set[tuple[str, int]] = dataclasses.field(default_factory=set[tuple[str, int]])
    partial: set[str] = dataclasses.field(default_factory=set[str])
    num_operations: int = 0

    def refuse(self, operation: str, where: Where, text: str) -> None:
        """Add a refusal."""
        where = where or NOWHERE
        self.refusals.append(Refusal(operation, where.file, where.line, text))

    def disagreement(self, partial: Collection[str], zero: Collection[str]) -> str:
        """Return the refusal, or a difference between types and numbers; nothing where they agree.

        Args:
            partial: FQNs of the parameters whose gradients are terms of a sum, by their numbers.
            zero: FQNs of those with zero gradients, of which numbers say nothing.
        """
        if self.refusals:
            return str(self.refusals[0])
        for name in sorted(self.partial.symmetric_difference(partial).difference(zero)):
            said, found = ("a term of a sum", "the same") if name in self.partial else ("the same", "a term of a sum")
            return f"types: the gradient of {name} is {said} on every rank, and the numbers say {found}"
        return ""


def _short(file: str) -> str:
    return os.sep.join(file.split(os.sep)[-3:])
