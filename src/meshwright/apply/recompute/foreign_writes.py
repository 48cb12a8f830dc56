"""Writes that no version counter and no operator shows: whether a layer's code may make them, and whether values have changed.

A kept result that was written over must be computed again. A write through `.data` is seen by a mode alone; one by NumPy, by
DLPack or by a library that is given an address, by nothing but the values.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from meshwright._torch_private import without_dispatch_modes, without_function_modes
from meshwright.apply.state.outside import names_of

__all__: list[str] = []

_WITHOUT_VERSION: Final = frozenset({"data", "_unsafe_preserve_version_counter", "_unsafe_set_version_counter"})
"""Names in code that may write over a tensor by an operator, but past its version counter."""

_WITHOUT_OPERATOR: Final = frozenset(
    {
        *("numpy", "asarray", "__array__", "to_dlpack", "from_dlpack", "__dlpack__"),
        *("data_ptr", "untyped_storage", "storage", "frombuffer"),
    }
)
"""Names in code that may hand a tensor's memory to what is not torch."""

_CHUNK: Final = 2**22
"""Of a value that is digested at a time [elements]."""

# Odd, so that multiplying by them loses no bit: 2^64 divided by the golden ratio, and a multiplier of splitmix64
# (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195), as signed numbers.
_PLACE: Final = 0x9E3779B97F4A7C15 - 2**64
_MIX: Final = 0xBF58476D1CE4E5B9 - 2**64


def names_of_forward(functions: Iterable[types.FunctionType]) -> set[str]:
    """Return the names that functions look up, of those that a forward may call.

    Args:
        functions: What the code of a layer reaches. Methods count if another one that counts names them.
    """
    waiting = list(functions)
    names = {"forward", "__call__"}
    is_reached = True
    while is_reached:
        left: list[types.FunctionType] = []
        for function in waiting:
            is_method = "." in function.__qualname__.rpartition("<locals>.")[2]
            if not is_method or function.__name__ in names:
                names |= names_of(function.__code__)
            else:
                left.append(function)
        is_reached = len(left) < len(waiting)
        waiting = left
    return names


def may_write_past_versions(names: set[str]) -> bool:
    """Tell whether code that looks up these names may write in a way that only a mode sees."""
    return bool(names & _WITHOUT_VERSION)


def may_write_past_operators(names: set[str]) -> bool:
    """Tell whether code that looks up these names may write in a way that nothing but values shows."""
    return bool(names & _WITHOUT_OPERATOR)


def digest(tensor: Tensor) -> int | None:
    """Return a number that depends on each bit of a tensor and on its place; None for tensors without plain memory."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    with torch.no_grad(), without_dispatch_modes(), without_function_modes():
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        size = flat.element_size()
        bits = flat.view(torch.int32 if size % 4 == 0 else torch.int16 if size == 2 else torch.int8)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, bits.numel(), _CHUNK):
            part = bits[start : start + _CHUNK].to(torch.int64)
            part ^= torch.arange(start, start + part.numel(), device=part.device).mul_(_PLACE)
            part.mul_(_MIX)
            part ^= part >> 29
            total += part.mul_(_MIX).sum()
        return int(total)
