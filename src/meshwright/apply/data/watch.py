"""Noticing that a parameter is looked up, wherever in the model that happens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

__all__: list[str] = []


class WatchedParameters(dict[str, Any]):
    """A module's parameters, which says when one is looked up. Iterating over them says nothing."""

    def __init__(self, plain: dict[str, Any], units: dict[str, int], need: Callable[[int], None]) -> None:
        super().__init__(plain)
        self._units = units
        self._need = need

    def __getitem__(self, name: str) -> Any:
        unit = self._units.get(name)
        if unit is not None:
            self._need(unit)
        return super().__getitem__(name)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy of the module is a plain one

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)
