"""Memory outside of torch that code may write into, as state: NumPy's arrays, bytearrays and Python's `array.array`."""

from __future__ import annotations

import array
import functools
from typing import Any, Final

import torch

__all__: list[str] = []

_MAX_BYTES: Final = 2**20
"""Of an array that is state; a larger one is data, such as a table that code looks numbers up in [bytes]."""


class ArrayState:
    """An array's entries at a moment, comparable by their bytes."""

    __slots__ = ("_bytes", "value")

    def __init__(self, value: Any) -> None:
        self.value = value[:] if isinstance(value, (bytearray, array.array)) else value.copy()
        self._bytes = bytes(value) if isinstance(value, bytearray) else value.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayState) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)


def is_array(value: Any) -> bool:
    """Tell whether a value is an array of numbers that code may write into, and not so large that it must be data."""
    kind = type(value)
    if kind is bytearray:
        return len(value) <= _MAX_BYTES
    if kind is array.array:
        return len(value) * value.itemsize <= _MAX_BYTES
    # Entries that are objects have contents of their own, which bytes do not show.
    return _is_of_numpy(kind) and value.nbytes <= _MAX_BYTES and value.flags.writeable and not value.dtype.hasobject


@functools.lru_cache(maxsize=10_000)
def _is_of_numpy(kind: type) -> bool:
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def shares_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Tell whether a NumPy array lies in a tensor's memory, as `torch.from_numpy` has it."""
    if (
        not _is_of_numpy(type(value))
        or type(tensor) is not torch.Tensor
        or tensor.device.type != "cpu"
        or tensor.is_meta
    ):
        return False
    if tensor.layout != torch.strided:
        return False
    start = tensor.untyped_storage().data_ptr()
    return start <= value.__array_interface__["data"][0] < start + tensor.untyped_storage().nbytes()


def read_array(value: Any) -> ArrayState:
    """Return an array's entries."""
    return ArrayState(value)


def write_array(value: Any, state: ArrayState) -> None:
    """Set an array's entries; of bytes, and of `array.array`, also how many there are."""
    if _is_of_numpy(type(value)):
        value[...] = state.value
    else:
        value[:] = state.value
