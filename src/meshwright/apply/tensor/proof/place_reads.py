"""Reads of the attributes in which modules record their own position, noticed while experiments run.

A layer that never reads its `layer_idx` does what its neighbour does. The class gets a descriptor of that name for as long as the
experiments run; types, instances and values stay what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from meshwright.apply.tensor.guards.signatures import PLACES

__all__: list[str] = []

_NOTHING = object()


class PlaceReads:
    """Whether code has read a position of the modules of one scope.

    Args:
        scope: The scope; experiments run copies of it, of the same classes.
    """

    def __init__(self, scope: nn.Module) -> None:
        self.was_read = False
        """Whether a position was read, or written, inside of `watched` by now."""
        found: dict[tuple[type, str], None] = {}
        for child in scope.modules():
            found |= dict.fromkeys((type(child), name) for name in vars(child) if name in PLACES)
        self._places = list(found)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notice reads inside the context."""
        before: list[tuple[type, str, Any]] = []
        try:
            for kind, name in self._places:
                was = vars(kind).get(name, _NOTHING)
                try:
                    setattr(kind, name, _WatchedPlace(self, name))
                except (AttributeError, TypeError):  # a class that lets nobody change it
                    self.was_read = True
                    continue
                before.append((kind, name, was))
            yield
        finally:
            for kind, name, value in reversed(before):
                if value is _NOTHING:
                    delattr(kind, name)
                else:
                    setattr(kind, name, value)


class _WatchedPlace:
    """Stands in front of an attribute of instances."""

    def __init__(self, reads: PlaceReads, name: str) -> None:
        self._reads = reads
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        self._reads.was_read = True
        if instance is None:
            raise AttributeError(f"type object '{owner.__name__}' has no attribute '{self._name}'")
        if self._name not in vars(instance):
            raise AttributeError(f"'{owner.__name__}' object has no attribute '{self._name}'")
        return vars(instance)[self._name]

    def __set__(self, instance: Any, value: Any) -> None:
        self._reads.was_read = True
        vars(instance)[self._name] = value

    def __delete__(self, instance: Any) -> None:
        self._reads.was_read = True
        del vars(instance)[self._name]
