"""Torch functions whose result, or its size, depends on values: a branch, a number, the entries under a mask.

Where the first stage computes these values, all other stages receive them, and come to the same number or size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright._torch_dispatch import SizeOfValuesError, is_of_library
from meshwright.apply.pipeline.walking.stand_ins import StageValue, tensors_of, value_of
from meshwright.apply.pipeline.walking.without_numbers import fails_on_fakes, has_size_of_numbers
from meshwright.trees import tensors_in

__all__: list[str] = []

_NUMBERS = """
    __bool__ __int__ __float__ __complex__ __index__ __contains__ item tolist is_nonzero equal allclose numpy
    """
_SIZES = "nonzero argwhere unique unique_consecutive _return_output _return_inverse bincount"
_ALWAYS = frozenset(f"{_NUMBERS} {_SIZES}".split())
_SOMETIMES = frozenset(["where", "__getitem__", "masked_select", "repeat_interleave", "one_hot"])
_READING = _ALWAYS | _SOMETIMES
_SHOWN = frozenset(["__array__", "__dlpack__", "__reduce_ex__", "_nnz", "to_sparse", "untyped_storage"])
"""Calls that give a layer's code numbers by ways that other stages cannot follow between layers."""
_MASKS = (torch.bool, torch.uint8)


def may_read(func: Callable[..., Any], values: Sequence[StageValue]) -> bool:
    """Tell whether `read_tensors` may return any for a call that is given these values: for most others, a quick no."""
    name = getattr(func, "__name__", "")
    return name in _READING or is_of_library(func) or any(_is_count(value.any) for value in values)


def looks_at_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call inside of a layer may make a number, or a size, of values: it reads some, or is given a count."""
    return (
        getattr(func, "__name__", "") in _SHOWN
        or bool(_read_by_name(func, args, kwargs))
        or any(_is_count(tensor) for tensor in tensors_of((args, kwargs)))
    )


def read_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments whose values decide a number, or the size of a result; none for any other call."""
    return _read_by_name(func, args, kwargs) or _counts(func, args, kwargs)


def _read_by_name(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if is_of_library(func):
        says_so = isinstance(fails_on_fakes(func, args, kwargs), SizeOfValuesError)
        return list(tensors_in((args, kwargs))) if says_so else []
    name = getattr(func, "__name__", "")
    if name in _ALWAYS or (name == "where" and len(args) + len(kwargs) == 1):
        return list(tensors_in((args, kwargs)))
    if name == "__getitem__":
        return [mask for mask in _of_index(args[1]) if mask.dtype in _MASKS]
    if name == "masked_select":
        return _named(args, kwargs, 1, "mask")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return _named(args, kwargs, 1, "repeats") or (list(tensors_in(args)) if len(args) + len(kwargs) == 1 else [])
    if name == "one_hot":
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return list(tensors_in((args, kwargs))) if not isinstance(classes, Tensor) and classes == -1 else []
    return []


def _is_count(tensor: Tensor) -> bool:
    return not (tensor.shape or tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _counts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return integers, tensors without a dim, that decide the size of a result: `x[:, : lengths.max()]`, `torch.arange(n)`."""
    found = [tensor for tensor in tensors_of((args, kwargs)) if value_of(tensor) is not None and _is_count(tensor)]
    return found if found and has_size_of_numbers(func, args, kwargs) else []


def _of_index(index: Any) -> Iterator[Tensor]:
    return tensors_in(index if isinstance(index, (tuple, list)) else (index,))


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> list[Tensor]:
    value = kwargs.get(name, args[place] if len(args) > place else None)
    return [value] if isinstance(value, Tensor) else []
