"""Parameters that code sets (`self.weight.data = ...`), or reaches by a module's containers, not by name."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from meshwright.apply.state.attributes import OF_TORCH
from meshwright.apply.state.outside import Outside, names_of

__all__: list[str] = []

_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_NOT_IN_FORWARD = ("__init__", "reset_parameters", "extra_repr", "load_state_dict")


def assigned_parameters(module: nn.Module) -> set[int]:
    """Return ids of the parameters that a method of some module sets through `.data`; one that only makes them does not count."""
    found: set[int] = set()
    chains: dict[type, list[tuple[str, ...]]] = {}
    for child in module.modules():
        kind = type(child)
        if kind not in chains:
            chains[kind] = list(_chains_of(kind))
        for *inner, name in chains[kind]:
            owner: nn.Module | None = child
            for part in inner:
                owner = None if owner is None else dict.get(owner._modules, part)
            # `dict.get` itself, since an engine may watch look-ups in these.
            parameter = None if owner is None else dict.get(owner._parameters, name)
            if parameter is not None:
                found.add(id(parameter))
    return found


def parameters_in_containers(module: nn.Module) -> set[int]:
    """Return ids of the parameters that the module which registers them also holds in a dict, list, tuple or set of its own.

    Nothing shows when code reads them there. Layers of torch do so too (`_flat_weights`), in forwards that are called as layers.
    """
    found: set[int] = set()
    for child in module.modules():
        if _is_torchs(type(child)):
            continue
        held = {id(parameter) for parameter in _values(child._parameters)}
        plain = (value for name, value in vars(child).items() if name not in OF_TORCH)
        found |= held.intersection(map(id, _entries(plain, depth=2)))
    return found


def _values(table: dict[str, Any]) -> Iterable[Any]:
    return dict.values(table)  # an engine may watch look-ups in these


def _entries(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in values:
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple, set) else ()
        for entry in inner:
            if isinstance(entry, nn.Parameter):
                yield entry
        if depth > 1:
            yield from _entries(inner, depth - 1)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def names_data(module: nn.Module) -> bool:
    """Tell whether code that a module's forward reaches names `.data`, through which torch counts no write."""
    functions = (function for function in Outside.of(module).functions if "init" not in function.__name__)
    return any("data" in names_of(function.__code__) for function in functions)


def _chains_of(kind: type) -> Iterator[tuple[str, ...]]:
    """Yield the names that lead from `self` to what methods of a class set the `.data` of."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "meshwright"):
            continue
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType) and name not in _NOT_IN_FORWARD and "init" not in name:
                yield from _chains_in(value.__code__)


def _chains_in(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    own = code.co_varnames[0] if code.co_argcount else None
    chain: list[str] | None = None  # names looked up of `self` since it was loaded
    for step in dis.get_instructions(code):
        if step.opname.startswith("LOAD_FAST"):
            chain = [] if step.argval == own else None
        elif step.opname == "STORE_ATTR" and step.argval == "data":
            if chain:
                yield tuple(chain)
            chain = None
        elif step.opname in _LOADS and chain is not None:
            name = str(step.argval)
            if chain[-1:] == ["data"] and name.endswith("_") and not name.endswith("__"):
                yield tuple(chain[:-1])
            chain.append(name)
        elif step.opname not in ("CACHE", "EXTENDED_ARG"):
            chain = None
