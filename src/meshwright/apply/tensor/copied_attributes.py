"""Attributes that the forward of a copy leaves, shown on the original model too.

A loss that reads `model.block.aux` refers to the original, while the search runs a copy of it.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from meshwright.apply.tensor.guards.described import OWN

__all__: list[str] = []

_WRITTEN_INTO: Final = (list, dict, set, collections.deque)


@contextlib.contextmanager
def attributes_shown(original: nn.Module, copy: nn.Module) -> Iterator[None]:
    """Inside the context, an attribute that a module of the copy sets is also the original's; that is restored afterwards."""
    pairs = list(zip(original.modules(), copy.modules(), strict=True))
    kept = [dict(vars(module)) for module, _ in pairs]
    handles = [twin.register_forward_hook(_shown_on(module, dict(vars(twin)))) for module, twin in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for (module, _), attributes in zip(pairs, kept, strict=True):
            for key in vars(module).keys() - attributes.keys():
                del vars(module)[key]
            vars(module).update(attributes)


def _shown_on(original: nn.Module, before: dict[str, Any]) -> Any:
    def show(copy: nn.Module, *_: Any) -> None:
        for key, value in vars(copy).items():
            is_new = before.get(key, before) is not value or isinstance(value, _WRITTEN_INTO)
            if is_new and key not in OWN and not isinstance(value, nn.Module):
                vars(original)[key] = value

    return show
