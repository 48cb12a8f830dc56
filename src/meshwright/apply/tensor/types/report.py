"""Report of the type check."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection

from meshwright.apply.tensor.types.lattice import Where

__all__: list[str] = []


@dataclasses.dataclass
class TypeReport:
    """Result of the type check of one run.

    Attributes:
        refusals: Operations that forbid the cut, where and why, as text; the check ends at the first.
        partial: FQNs of parameters that are whole, and whose gradients are terms of a sum.
        num_operations: Calls that the check has followed [count].
    """

    refusals: list[str] = dataclasses.field(default_factory=list[str])
    partial: set[str] = dataclasses.field(default_factory=set[str])
    num_operations: int = 0

    def refuse(self, operation: str, where: Where, text: str) -> None:
        """Add a refusal."""
        place = f" at {os.sep.join(where.file.split(os.sep)[-3:])}:{where.line}" if where.file else ""
        self.refusals.append(f"types: {operation}{place} {text}")

    def disagreement(self, partial: Collection[str], zero: Collection[str]) -> str:
        """Return the refusal, or a difference between types and numbers; nothing where they agree.

        Args:
            partial: FQNs of the parameters whose gradients are terms of a sum, by their numbers.
            zero: FQNs of those with zero gradients, of which numbers say nothing.
        """
        if self.refusals:
            return self.refusals[0]
        for name in sorted(self.partial.symmetric_difference(partial).difference(zero)):
            said, found = ("a term of a sum", "the same") if name in self.partial else ("the same", "a term of a sum")
            return f"types: the gradient of {name} is {said} on every rank, and the numbers say {found}"
        return ""
