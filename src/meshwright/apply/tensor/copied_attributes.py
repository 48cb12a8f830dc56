"""Attributes that the forward of a copy leaves, shown on the original model too.

A loss that reads `model.block.aux` refers to the original, while the search runs a copy of it.
"""

from __future__ import annotations

import collections
from typing import Any, Final, Self

from torch import nn

from meshwright.apply.tensor.guards.described import OWN

__all__: list[str] = []

_WRITTEN_INTO: Final = (list, dict, set, collections.deque)


class CopiedAttributes:
    """Inside the context, an attribute that a module of the copy sets is also the original's attribute.

    Args:
        original: The model that the user's code holds; it is restored afterwards.
        copy: The copy that runs.
    """

    def __init__(self, original: nn.Module, copy: nn.Module) -> None:
        self._pairs = list(zip(original.modules(), copy.modules(), strict=True))
        self._kept: list[tuple[nn.Module, dict[str, Any]]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._kept = [(original, dict(vars(original))) for original, _ in self._pairs]
        for original, copy in self._pairs:
            self._handles.append(copy.register_forward_hook(_shown_on(original, dict(vars(copy)))))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for original, kept in self._kept:
            for key in vars(original).keys() - kept.keys():
                del vars(original)[key]
            vars(original).update(kept)
        self._handles, self._kept = [], []


def _shown_on(original: nn.Module, before: dict[str, Any]) -> Any:
    def show(copy: nn.Module, *_: Any) -> None:
        for key, value in vars(copy).items():
            is_new = before.get(key, before) is not value or isinstance(value, _WRITTEN_INTO)
            if is_new and key not in OWN and not isinstance(value, nn.Module):
                vars(original)[key] = value

    return show
