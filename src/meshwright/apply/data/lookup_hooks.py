"""Hooks on the lookup of a parameter, wherever in the model it happens."""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, Sequence, ValuesView
from typing import Any

__all__: list[str] = []


class WatchedParameters(dict[str, Any]):
    """A module's parameter dict that reports each lookup.

    Args:
        plain: The parameters.
        units: Name -> the unit that holds it.
        need: Called with the unit of a name that is looked up.
        need_all: Called with all units where code iterates over the parameters, as `module.parameters()` does.
        on_copy: Called before a copy is made.
    """

    def __init__(
        self,
        plain: dict[str, Any],
        units: dict[str, int],
        need: Callable[[int], None],
        need_all: Callable[[Sequence[int]], None],
        on_copy: Callable[[], None],
    ) -> None:
        super().__init__(plain)
        self._units = units
        self._need = need
        self._need_all = need_all
        self._on_copy = on_copy

    def __getitem__(self, name: str) -> Any:
        unit = self._units.get(name)
        if unit is not None:
            self._need(unit)
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return what dict.items returns."""
        self._need_all(sorted(set(self._units.values())))
        return super().items()

    def values(self) -> ValuesView[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return what dict.values returns."""
        self._need_all(sorted(set(self._units.values())))
        return super().values()

    def __reduce__(self) -> Any:
        self._on_copy()
        return dict, (dict(self),)  # a copy of the module is a plain one

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        self._on_copy()
        return copy.deepcopy(dict(self), memo)
