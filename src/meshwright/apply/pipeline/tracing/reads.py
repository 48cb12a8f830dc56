"""Torch functions whose result, or its size, depends on values: a branch, a number, the entries under a mask.

Where the first stage computes these values, all other stages receive them, and come to the same number or size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright._torch_dispatch import SizeOfValuesError, is_of_library
from meshwright.apply.pipeline.walking.stand_ins import Meta, make_fake, replace_tensors, value_of
from meshwright.apply.pipeline.walking.without_numbers import NeedsNumbersError, run_fake
from meshwright.trees import tensors_in

__all__: list[str] = []

_NUMBERS = """
    __bool__ __int__ __float__ __complex__ __index__ __contains__ item tolist is_nonzero equal allclose numpy
    """
_SIZES = "nonzero argwhere unique unique_consecutive _return_output _return_inverse bincount"
_ALWAYS = frozenset(f"{_NUMBERS} {_SIZES}".split())
_SOMETIMES = frozenset(["where", "__getitem__", "masked_select", "repeat_interleave", "one_hot"])
_READING = _ALWAYS | _SOMETIMES
_MASKS = (torch.bool, torch.uint8)


def may_read(func: Callable[..., Any]) -> bool:
    """Tell whether there are calls of a function for which `read_tensors` returns any: for the many others, a quick no."""
    return getattr(func, "__name__", "") in _READING or is_of_library(func)


def read_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments whose values decide a number, or the size of a result; none for any other function."""
    if is_of_library(func):
        return list(tensors_in((args, kwargs))) if _has_size_of_values(func, args, kwargs) else []
    name = getattr(func, "__name__", "")
    if name in _ALWAYS or (name == "where" and len(args) + len(kwargs) == 1):
        return list(tensors_in((args, kwargs)))
    if name == "__getitem__":
        return [mask for mask in _of_index(args[1]) if mask.dtype in _MASKS]
    if name == "masked_select":
        return _named(args, kwargs, 1, "mask")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return _named(args, kwargs, 1, "repeats") or (list(tensors_in(args)) if len(args) + len(kwargs) == 1 else [])
    if name == "one_hot" and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
        return list(tensors_in((args, kwargs)))
    return []


def _of_index(index: Any) -> Iterator[Tensor]:
    return tensors_in(index if isinstance(index, (tuple, list)) else (index,))


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> list[Tensor]:
    value = kwargs.get(name, args[place] if len(args) > place else None)
    return [value] if isinstance(value, Tensor) else []


def _has_size_of_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operator says of itself, on tensors without values, that values decide the size of its result."""

    def fake(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        return make_fake(Meta.of(tensor if value is None else value.any))

    try:
        run_fake(func, *replace_tensors((args, kwargs), fake))
    except NeedsNumbersError as error:
        return isinstance(error.__cause__, SizeOfValuesError)
    return False
