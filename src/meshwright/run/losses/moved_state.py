"""State outside of a model's modules that calls move: counts in a loss, a global variable, a class, a closure or a hook.

A call that reads such a number before it sets it counts calls, or averages over them: with micro-batches there are more of
them than on one device. What code sets without reading it (the last loss, a list of losses) is for people alone.
"""

from __future__ import annotations

import dis
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from meshwright.apply.state.attributes import is_object
from meshwright.apply.state.hook_tables import is_ours
from meshwright.apply.state.outside import Outside

__all__: list[str] = []

_COUNTS = (int, float, str)  # with bool
_MOST_ENTRIES = 64
"""Of a list or dict that is compared [count]."""
_MOST_NUMBERS = 2**16
"""Of a tensor that is compared [count]."""
_LOADS = frozenset({"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF"})
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"})


class MovedState:
    """What the code of a model, its loss, and its hooks on gradients keeps elsewhere and moves.

    Args:
        module: The model.
        loss_fn: The loss, or None.
    """

    def __init__(self, module: nn.Module, loss_fn: Any) -> None:
        # Under ZeRO-3 their dicts gather what is asked for.
        held = [p for child in module.modules() for p in dict.values(child._parameters) if p is not None]
        found = [hook for p in held for hook in (p._backward_hooks or {}).values() if not is_ours(hook)]
        others = [getattr(hook, "hook", hook) for hook in found]  # in our wrapper
        self._modules = list(module.named_modules())
        self._outsides = [Outside.of(module), Outside(None, [*others, *([] if loss_fn is None else [loss_fn])])]
        codes = [function.__code__ for outside in self._outsides for function in outside.functions]
        self._moved = {name for code in codes for name in moved_in(code)}
        self._entries = {name for code in codes for name in entries_in(code)}

    def now(self, *, with_modules: bool = False) -> dict[str, str]:
        """Return the present values by name, as texts, those of attributes of the model's own modules too if asked."""
        names, texts = self._moved | self._entries, dict[str, str]()
        for path, child in self._modules if with_modules else ():
            for name in sorted(vars(child).keys() & self._moved):
                text = text_of(vars(child)[name])
                texts |= {} if text is None else {_attribute(path, name): text}
        for path, child in self._modules:
            for name, value in vars(child).items():
                if isinstance(value, Iterator) and (text := _place_of(value)) is not None:
                    texts[_attribute(path, name)] = text
        for outside in self._outsides if names else ():
            variables = outside.variables()
            rows = [(name, label, value) for name, label, value in variables if name in names]
            values = [value for *_, value in variables]
            if outside is self._outsides[0]:  # the model's, whose modules keep objects
                values += [value for _, child in self._modules for value in vars(child).values()]
            for owner in [*outside.objects(), *filter(is_object, values)]:
                held: Mapping[str, Any] = getattr(owner, "__dict__", {})
                kind = type(owner).__name__
                rows += [(name, f"{kind}.{name}", held[name]) for name in sorted(held.keys() & names)]
                if isinstance(owner, nn.Module):
                    rows += [(None, f"{kind}.{name}", value) for name, value in owner._buffers.items()]
            for name, label, value in rows:
                is_container = isinstance(value, (dict, list))
                if name is None or name in (self._entries if is_container else self._moved):
                    text = text_of(value)
                    texts |= {} if text is None else {f"variable '{label}'": text}
        return texts


def _attribute(path: str, name: str) -> str:
    return f"attribute '{path}.{name}'" if path else f"attribute '{name}'"


def text_of(value: Any) -> str | None:
    """Return a number as text, of containers those in them; None where there is none."""
    if isinstance(value, _COUNTS):
        return repr(value)
    if isinstance(value, Tensor):
        is_read = value.numel() <= _MOST_NUMBERS and type(value) is Tensor and not value.is_meta
        return repr(float(value.detach().abs().double().sum())) if is_read else None
    if isinstance(value, np.ndarray):
        is_read = value.size <= _MOST_NUMBERS and value.dtype.kind in "biufc"
        return repr(float(np.abs(value).sum())) if is_read else None
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list) and len(value) <= _MOST_ENTRIES:
        return repr([item if isinstance(item, _COUNTS) else text_of(item) for item in value])
    return None


def _place_of(iterator: Iterator[Any]) -> str | None:
    """Return where an iterator stands, without moving it; None where it does not tell."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    left = operator.length_hint(iterator, -1)
    return None if left < 0 else f"{left} left"


def moved_in(code: types.CodeType) -> Iterator[str]:
    """Yield names of attributes and variables that code, or its inner functions, read first and set after it."""
    read: set[tuple[str, str]] = set()
    for step in dis.get_instructions(code):
        kind = step.opname.partition("_")[2]
        if step.opname in _LOADS:
            read.add((kind, step.argval))
        elif step.opname in _STORES and (kind, step.argval) in read:
            yield step.argval
    yield from _in_inner(code, moved_in)


def entries_in(code: types.CodeType) -> Iterator[str]:
    """Yield names of attributes and variables of which code may read an entry first, and set it after it."""
    read: set[str] = set()
    has_entry = False
    for step in dis.get_instructions(code):
        if step.opname in _LOADS:
            read.add(step.argval)
        elif step.opname.startswith("BINARY_SUBSCR") or (step.opname == "BINARY_OP" and "[" in step.argrepr):
            has_entry = True
        elif step.opname == "STORE_SUBSCR" and has_entry:
            yield from read
    yield from _in_inner(code, entries_in)


def _in_inner(code: types.CodeType, find: Callable[[types.CodeType], Iterator[str]]) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from find(constant)
