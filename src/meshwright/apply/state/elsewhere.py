"""Values of state outside of a model at one moment, which can be restored and compared."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.apply.state.attributes import may_change, read_parts, write_parts
from meshwright.apply.state.copied_iterators import COPIED_ITERATORS, copied
from meshwright.apply.state.grown import Grown
from meshwright.trees import LEAVES, write_back

__all__: list[str] = []

_DEPTH = 4  # depth of nested containers and objects
_MAX_ENTRIES = 10_000
"""Of a container that is copied; a larger one is data, not state [count]."""
_MAX_BYTES = 2**22
"""Of a tensor that is copied whether or not it is written to [bytes]."""


class Elsewhere:
    """Values at one moment, which can be restored.

    Args:
        grown: What attributes classes and functions had then.
    """

    def __init__(self, grown: Grown) -> None:
        self._grown = grown
        self._slots: list[tuple[Any, str, str, Any, tuple[int, str]]] = []
        self._tensors: list[tuple[Tensor, int, Tensor | None]] = []
        self._inside: list[tuple[Any, Any, str]] = []
        self._seen: set[int] = set()

    def add_slot(self, space: Any, name: str, label: str, key: tuple[int, str]) -> None:
        """Record a variable and its contents, if it has been assigned."""
        value = value_in(space, name)
        if value is None and name not in space:
            return
        if isinstance(value, COPIED_ITERATORS):
            value = copied(value)  # an iterator cannot be rewound: a copy at the same position replaces it
        self._slots.append((space, name, label, value, key))
        self.keep(value, label)

    def keep(self, value: Any, label: str, depth: int = _DEPTH) -> None:
        """Record the contents of a value."""
        if not depth or id(value) in self._seen or not may_change(value):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            is_plain = (
                type(value) is Tensor
                and value.layout == torch.strided
                and value.nbytes <= _MAX_BYTES
                and not value.is_meta
            )
            held = value.detach().clone() if is_plain else None
            self._tensors.append((value, value._version, held))
            return
        if isinstance(value, tuple):
            parts: Any = value
        else:
            if isinstance(value, (list, dict, set, collections.deque)) and len(value) > _MAX_ENTRIES:
                return
            parts = _with_copies(read_parts(value))
            self._inside.append((value, parts, label))
        for item in _items(parts):
            self.keep(item, label, depth - 1)

    def restore(self) -> None:
        """Restore everything."""
        self._grown.undo()
        for space, name, _, value, _ in self._slots:
            if value_in(space, name) is not value:
                # Another copy, since this may be restored again.
                space[name] = copied(value) if isinstance(value, COPIED_ITERATORS) else value
        for value, parts, _ in self._inside:
            if not _is_same(read_parts(value), parts):
                write_parts(value, parts)
        for tensor, version, held in self._tensors:
            if tensor._version != version and held is not None:
                write_back(tensor, held, version)

    def changed(self, *, by_value: bool = False) -> dict[Any, str]:
        """Return the changes: keys for `reaches`, with names. A dict that has only grown is a cache, and not a change.

        Args:
            by_value: Whether a number, a text or a tensor that is equal to the one before is none.
        """
        found: dict[Any, str] = {}
        alike = _is_equal if by_value else _is_alike
        for space, name, label, value, key in self._slots:
            if not (alike(value_in(space, name), value) or isinstance(value, COPIED_ITERATORS)):
                found[key] = label
        for value, then, label in self._inside:
            now = read_parts(value)
            has_grown = isinstance(now, dict) and all(name in now and alike(now[name], then[name]) for name in then)
            if not (has_grown or _is_same(now, then)):
                found[id(value)] = label
        for tensor, version, _ in self._tensors:
            if tensor._version != version:
                found[id(tensor)] = f"a tensor of shape {list(tensor.shape)}"
        return found

    def reaches(self, changes: Mapping[Any, str]) -> list[str]:
        """Return the names of another record's changes (`changed`) that this record holds too."""
        mine: set[Any] = {id(value) for value, _, _ in self._inside} | {id(tensor) for tensor, _, _ in self._tensors}
        mine |= {key for *_, key in self._slots}
        return [label for key, label in changes.items() if key in mine]


def value_in(space: Any, name: str) -> Any:
    try:
        return space[name]
    except KeyError:
        return None


def _items(parts: Any) -> Iterator[Any]:
    if isinstance(parts, dict):
        yield from parts.values()
    elif isinstance(parts, (list, tuple, set)):
        yield from parts


def _with_copies(parts: Any) -> Any:
    """Return the parts of a value with iterators copied: one cannot be rewound, so a copy replaces it."""
    if isinstance(parts, dict):
        for name in [name for name, item in parts.items() if isinstance(item, COPIED_ITERATORS)]:
            parts[name] = copied(parts[name])
    return parts


def _is_alike(now: Any, then: Any) -> bool:
    return now is then or isinstance(then, COPIED_ITERATORS)


def _is_equal(now: Any, then: Any) -> bool:
    if _is_alike(now, then):
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, Tensor):
        return now.shape == then.shape and torch.equal(now, then)
    return type(now) in LEAVES and bool(now == then)


def _is_same(now: Any, then: Any) -> bool:
    if isinstance(now, dict) and isinstance(then, dict):
        return now.keys() == then.keys() and all(now[key] is then[key] for key in now)
    if isinstance(now, list) and isinstance(then, list):
        return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
    return bool(now == then)
