"""Integers that the code between layers counts in attributes: alike on all stages, or the stages are at different places."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__: list[str] = []


class Counters:
    """Integers in attributes of the modules around layers.

    Every stage runs that code for each micro-batch, so each counts alike. After a step that ended in an error some stages have
    run more micro-batches than others.

    Args:
        modules: The modules around layers.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._first = [_integers(module) for module in modules]

    def changes(self) -> tuple[int, ...]:
        """Return by how much each has changed; what differs from the start (a rank's number) stays out of it."""
        found: list[int] = []
        for place, (module, first) in enumerate(zip(self._modules, self._first, strict=True)):
            now = _integers(module)
            if now != first:
                found += [place, *(value - first.get(key, 0) for key, value in now.items())]
        return tuple(found)


def _integers(module: nn.Module) -> dict[str, int]:
    return {key: value for key, value in vars(module).items() if type(value) is int}
