"""Calls of units, and of the model, come by the forward that is under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from meshwright.apply.pipeline.walk import Walk
from meshwright.apply.subclass import with_forward

__all__: list[str] = []

Forward = Callable[..., Any]


class UnderWay:
    """The forward that is under way on this rank, if any."""

    __slots__ = ("walk",)

    def __init__(self) -> None:
        self.walk: Walk | None = None


class Interception:
    """Modules whose forward is another while a stage walks.

    Args:
        module: The model.
        units: Names of the modules whose calls are dealt out; of one with several names the first counts.
        under_way: Where the stages say which forward is under way.
    """

    def __init__(self, module: nn.Module, units: Sequence[str], under_way: UnderWay) -> None:
        self._under_way = under_way
        found: dict[int, tuple[nn.Module, str]] = {}
        for name in units:
            unit = module.get_submodule(name)
            found.setdefault(id(unit), (unit, name))
        changes = [(unit, self._of_unit(name, type(unit).forward)) for unit, name in found.values()]
        changes.append((module, self._of_model(type(module).forward)))
        self._classes = [(unit, type(unit), with_forward(type(unit), forward)) for unit, forward in changes]
        self._set(changed=True)

    def _of_unit(self, name: str, original: Forward) -> Forward:
        def forward(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
            walk = self._under_way.walk
            if walk is None or walk.is_paused:
                return original(unit, *args, **kwargs)
            return walk.call_unit(name, unit, original, args, kwargs)

        return forward

    def _of_model(self, original: Forward) -> Forward:
        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outputs = original(model, *args, **kwargs)
            walk = self._under_way.walk
            if walk is not None:
                walk.end_model(outputs)
            return outputs

        return forward

    def _set(self, *, changed: bool) -> None:
        for unit, original, other in self._classes:
            unit.__class__ = other if changed else original

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Have the modules their own inside."""
        self._set(changed=False)
        try:
            yield
        finally:
            self._set(changed=True)

    def close(self) -> None:
        """Give the modules their own classes back."""
        self._set(changed=False)
