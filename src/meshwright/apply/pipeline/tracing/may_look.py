"""Units whose code names what reads values, or what draws: on a branch that the first batch did not take, they may do so."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from meshwright.apply.state.outside import Outside, names_of

__all__: list[str] = []

_VALUES = ("item", "tolist", "numpy", "nonzero", "is_nonzero", "equal", "allclose", "unique", "count_nonzero")
_READING = frozenset((*_VALUES, "any", "all", "int", "float", "bool", "len", "asarray", "array"))


def units_that_may_look(module: nn.Module, units: Iterable[str]) -> Iterator[str]:
    """Yield the units in whose modules a method of their own names such a call.

    Args:
        module: The model.
        units: Names of modules.
    """
    known: dict[type, bool] = {}
    for unit in units:
        for child in module.get_submodule(unit).modules():
            kind = type(child)
            if kind not in known:
                known[kind] = any(_names_a_reading(base) for base in kind.__mro__ if not _is_torchs(base))
            if known[kind]:
                yield unit
                break


def units_that_may_draw(module: nn.Module, units: Sequence[str]) -> set[str]:
    """Return the units whose code can draw from Python's or NumPy's generator, in another mode or with another batch."""
    own = {name for name in units if Outside(module.get_submodule(name)).draws} if Outside.of(module).draws else None
    return set() if own is None else own | {""}


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins", "meshwright")


def _names_a_reading(kind: type) -> bool:
    return any(
        not _READING.isdisjoint(names_of(function.__code__))
        for value in vars(kind).values()
        if isinstance(function := getattr(value, "__func__", value), types.FunctionType)
        if function.__name__ != "__init__"
    )
