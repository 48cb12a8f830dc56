"""Values of an optimizer's or a schedule's state as JSON, with tensors beside them.

JSON has no tensors, tuples or infinities: each is an object with one key, `{"tensor": NAME}` for example. Nothing else is
accepted, in either direction, so that a file cannot make anything happen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from meshwright.errors import CheckpointError

__all__: list[str] = []

_MOST_DEPTH = 16


def encode(value: Any, where: str, keep: Callable[[str, Tensor], None], depth: int = 0) -> Any:
    """Return a value as JSON.

    Args:
        value: Numbers, texts, None, tensors, Counters of numbers and texts, and lists, tuples and dicts of them.
        where: The value's name, of which the names of its tensors are made.
        keep: Called with each tensor and its name.
        depth: Containers around it [count].

    Raises:
        CheckpointError: It is, or holds, something else.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        keep(where, value)
        return {"tensor": where}
    if depth < _MOST_DEPTH:
        if isinstance(value, (list, tuple)):
            items = [encode(item, f"{where}/{index}", keep, depth + 1) for index, item in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, Counter) and all(
            type(key) in (int, str) and type(count) is int for key, count in value.items()
        ):
            return {"counter": [[key, count] for key, count in value.items()]}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(item, f"{where}/{key}", keep, depth + 1) for key, item in value.items()}}
    raise CheckpointError(
        f"'{where}' is a {type(value).__name__}, which cannot be saved (rule: numbers, texts, None, tensors, Counters, and "
        f"lists, tuples and dicts of them, at most {_MOST_DEPTH} deep)"
    )


def decode(value: Any, where: str, read: Callable[[str], Tensor], depth: int = 0) -> Any:
    """Return what `encode` was given.

    Args:
        value: JSON.
        where: Its name, for errors.
        read: Returns the tensor of a name.
        depth: Containers around it [count].

    Raises:
        CheckpointError: It is nothing that `encode` returns.
    """
    if value is None or isinstance(value, (bool, int, str, float)):
        return value
    if depth <= _MOST_DEPTH:
        if isinstance(value, list):
            return [decode(item, where, read, depth + 1) for item in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, inside),) = value.items()
            if kind == "float" and inside in ("inf", "-inf", "nan"):
                return float(inside)
            if kind == "tensor" and isinstance(inside, str):
                return read(inside)
            if kind == "tuple" and isinstance(inside, list):
                return tuple(decode(item, where, read, depth + 1) for item in inside)
            if kind == "counter" and _is_counted(inside):
                return Counter(dict(inside))
            if kind == "dict" and isinstance(inside, dict):
                return {key: decode(item, where, read, depth + 1) for key, item in inside.items()}
    raise CheckpointError(
        f"the checkpoint has {str(value)[:60]!r} for '{where}', which is no value of an optimizer or a schedule"
    )


def _is_counted(rows: Any) -> bool:
    pairs = isinstance(rows, list) and all(isinstance(row, list) and len(row) == 2 for row in rows)
    return pairs and all(type(key) in (int, str) and type(count) is int for key, count in rows)
