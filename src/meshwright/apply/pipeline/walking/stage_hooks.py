"""Hooks that forwards have registered, one set for each stage of a rank: each of them runs the whole forward.

A forward registers hooks where an attribute does not say yet that it has, and each stage has its own attributes.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__: list[str] = []

_Entry = tuple[dict[int, Any], int, Any]
"""A table of hooks, the hook's number and the hook."""


class StageHooks:
    """The forward hooks of a model's modules, of which those that a stage's forward registers are that stage's alone.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [
            table for child in module.modules() for table in (child._forward_hooks, child._forward_pre_hooks)
        ]
        self._own: dict[int, list[_Entry]] = {}
        self._shown: int | None = None
        self._first = self._count = 0

    def enter(self, stage: int) -> None:
        """Show the hooks of a stage, whose forward comes next, in place of those of the stage before."""
        if self._shown is not None and self._shown != stage:
            for table, number, _ in self._own.get(self._shown, ()):
                table.pop(number, None)
            for table, number, hook in self._own.get(stage, ()):
                table[number] = hook
        self._shown = stage
        self._first, self._count = RemovableHandle.next_id, self._number()

    def leave(self) -> None:
        """Note the hooks that the forward has registered or removed."""
        if self._shown is None or self._number() == self._count:
            return
        kept = [
            (table, number, table[number]) for table, number, _ in self._own.get(self._shown, ()) if number in table
        ]
        new = [(table, n, hook) for table in self._tables for n, hook in table.items() if n >= self._first]
        self._own[self._shown] = [*kept, *new]

    def copied(self) -> tuple[dict[int, list[_Entry]], int | None]:
        """Return what is known, to be given to `put_back`."""
        return dict(self._own), self._shown

    def put_back(self, state: tuple[dict[int, list[_Entry]], int | None]) -> None:
        """Know again what `copied` gave; the hooks themselves are restored by whoever tries a forward."""
        self._own, self._shown = state

    def _number(self) -> int:
        return sum(map(len, self._tables))
