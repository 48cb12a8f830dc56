"""State outside modules that a layer changes and others use, such as a global counter or a generator. Stages cannot share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from meshwright.apply.pipeline.tracing.call_trace import modules_around
from meshwright.apply.state.outside import Elsewhere, Outside

__all__: list[str] = []


class SharedState:
    """Watches the calls of units for changes of global variables, closures, class attributes and generators.

    Args:
        module: The model.
        units: Names of the modules that are dealt out to stages.
    """

    def __init__(self, module: nn.Module, units: Sequence[str]) -> None:
        self._module = module
        self._units = units
        self._outside: dict[str, Outside] = {}
        self._changes: dict[str, dict[Any, str]] = {}

    def begin(self, name: str, unit: nn.Module) -> Elsewhere:
        """Return the state that a unit's code can reach before its call."""
        if name not in self._outside:
            self._outside[name] = Outside(unit)
        return self._outside[name].take(with_attributes=False)

    def end(self, name: str, before: Elsewhere) -> None:
        """Record what the call has changed."""
        changes = before.changed()
        if changes:
            self._changes.setdefault(name, {}).update(changes)

    def texts(self) -> Iterator[str]:
        """Yield a text for each state that a unit changes and other units, or the code between them, use."""
        if not self._changes:
            return
        around = [type(child).forward for _, child in modules_around(self._module, self._units)]
        users = {f"layer '{name}'": outside for name, outside in self._outside.items()}
        users["the code between layers"] = Outside(None, around)
        for name, changes in self._changes.items():
            for user, outside in users.items():
                used = outside.take(with_attributes=False).reaches(changes) if user != f"layer '{name}'" else []
                if used:
                    yield f"layer '{name}' changes {used[0]}, which {user} uses as well"
                    break
