"""Attributes of objects whose classes keep them in `__slots__`."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

__all__: list[str] = []


def has_slots(kind: type) -> bool:
    """Tell whether a class, or one that it derives from, keeps attributes in slots."""
    return bool(_slots_of(kind))


def read_slots(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are in slots and set."""
    found: dict[str, Any] = {}
    for name, slot in _slots_of(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue
    return found


def write_slots(value: Any, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Set an object's slots, delete those that are not given, and return the attributes that are not in slots."""
    slots = _slots_of(type(value))
    for name in read_slots(value).keys() - parts.keys():
        slots[name].__delete__(value)
    for name in slots.keys() & parts.keys():
        slots[name].__set__(value, parts[name])
    return {name: item for name, item in parts.items() if name not in slots}


@functools.lru_cache(maxsize=10_000)
def _slots_of(kind: type) -> dict[str, Any]:
    """Return the slots of a class by name; a private name as Python writes it there. Those of C have no `__slots__`."""
    return {
        name: slot
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    }
