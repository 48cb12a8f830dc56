"""Iterators that a forward advances and that cannot be rewound, such as a Python generator that a module keeps.

A plan runs a model on trial, inspects it, and repeats layers. All other state is restored afterwards; an item that `next` has
taken from a generator, `map` or `zip` is lost. So such a model is refused.
"""

from __future__ import annotations

import collections
import functools
import io
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from meshwright.apply.state.attributes import is_object, is_whole, read_parts
from meshwright.apply.state.copied_iterators import COPIED_ITERATORS, can_be_copied
from meshwright.apply.state.outside import Outside
from meshwright.apply.state.reached_code import names_read
from meshwright.errors import ApplyError

__all__: list[str] = []

_CONTAINERS = (list, tuple, set, dict, collections.deque)
_DEPTH = 4  # depth of nested containers and objects that are searched


def refuse_iterators(module: nn.Module, functions: Sequence[Any], plan: str) -> None:
    """Raise ApplyError where a forward, a hook or a loss reaches an iterator that cannot be rewound.

    Args:
        module: The model.
        functions: Further code that runs beside its forward: the loss.
        plan: The plan, for the error.
    """
    outside = Outside(module, functions)
    names = names_read(module, functions, outside)
    held = [
        (f"{type(child).__name__}.{name}", value)
        for child in module.modules()
        for name, value in vars(child).items()
        if name in names
    ]
    held += [(label, value) for name, label, value in outside.variables() if name in names]
    for label, value in held:
        found = next(_iterators_in(value, _DEPTH), None)
        if found is not None:
            raise ApplyError(
                f"'{label}' is or holds an iterator of type '{type(found).__name__}', which cannot be rewound: the plan "
                f"'{plan}' runs the model on trial, so that the items a trial takes would be missing in training",
                fix="keep a list and a counter in its place, a torch.Generator where it gives random numbers, or an object with "
                "`__next__` whose state is in plain attributes",
            )


def _iterators_in(value: Any, depth: int) -> Iterator[Any]:
    is_copied = isinstance(value, COPIED_ITERATORS) and can_be_copied(value)
    is_iterator = hasattr(type(value), "__next__") and not is_copied and not isinstance(value, io.IOBase)
    if is_iterator and not is_object(value):
        yield value
    if not depth or is_whole(value):
        return
    parts: Any = ()
    if isinstance(value, _CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
    elif isinstance(value, types.MethodType):
        parts = (value.__self__,)
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif is_object(value) and not isinstance(value, nn.Module):
        parts = read_parts(value).values()
    for part in list(parts):
        yield from _iterators_in(part, depth - 1)
