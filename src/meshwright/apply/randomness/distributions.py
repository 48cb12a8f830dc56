"""Random numbers by their elements' places: uniform, Bernoulli, normal, exponential, integers; on any device.

The native code and torch operators give the same bits. What comes after the uniform numbers (logarithms, quantiles) is computed
by torch in float64 and rounded to the wanted dtype.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from meshwright.apply.randomness import gpu, native
from meshwright.apply.randomness.philox import NO_SAMPLE, ElementPlace, words_at
from meshwright.apply.randomness.single_numbers import is_moving, moved, take_end

__all__: list[str] = []

_BITS: Final = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a uniform number, as in torch: every multiple of 2**-bits is exact in the dtype."""
_WORD: Final = 2**32
_SMALL_RANGE: Final = 2**31
_OPEN_BITS: Final = 52


def takes(place: ElementPlace, device: torch.device) -> bool:
    """Tell whether native code can fill a tensor on a device."""
    return native.takes(place, device) if device.type == "cpu" else place.rows is None and gpu.is_there(device)


def _native(device: torch.device) -> Any:
    return native if device.type == "cpu" else gpu


def words(place: ElementPlace, plane: int, device: torch.device) -> Tensor:
    """Return a word for each element: int64, values below 2**32, one dim."""
    if not takes(place, device):
        return words_at(place, plane, device)
    bits = torch.empty(place.count, dtype=torch.int32, device=device)
    _native(device).fill_words(bits, place, plane)
    return bits.to(torch.int64) & (_WORD - 1)


def fill_bernoulli(out: Tensor, place: ElementPlace, probability: float) -> None:
    """Set each element of a contiguous tensor to 1 with a probability, rounded to a multiple of 2**-32, and else to 0."""
    if out.numel() != place.count:
        raise ValueError(f"{place.count} places for {out.numel()} elements")
    most = min(round(probability * _WORD), _WORD) - 1
    if _is_single(place) and 0 <= most < _WORD - 1 and (end := take_end()) is not None:
        most = (_WORD - 1) * (1 - end) - end
    if most < 0 or most == _WORD - 1:
        out.fill_(most >= 0)
    elif takes(place, out.device) and not out.is_complex():
        _native(out.device).fill_kept(out, place, most)
    else:
        out.copy_((words_at(place, 0, out.device) <= most).view(out.shape))


def _is_single(place: ElementPlace) -> bool:
    """Tell whether this is a trial near an end, and one number is drawn for all samples, by which code may decide."""
    return is_moving() and place.count == 1 and place.first_sample == NO_SAMPLE


def uniform(place: ElementPlace, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uniform numbers in [0, 1) of a floating dtype, one dim: multiples of 2**-53, 2**-24, 2**-11 or 2**-8."""
    made = _uniform(place, dtype, device)
    if not _is_single(place):
        return made
    most = 1 - 2.0 ** -_BITS.get(dtype, 53)
    return torch.full_like(made, min(moved(float(made), 0.0, 1.0), most))


def _uniform(place: ElementPlace, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.float64:
        if takes(place, device):
            out = torch.empty(place.count, dtype=dtype, device=device)
            _native(device).fill_uniform(out, place, 53)
            return out
        both = (words_at(place, 0, device) << 21) | (words_at(place, 1, device) >> 11)
        return both.to(dtype) * 2.0**-53
    bits = _BITS[dtype]
    if takes(place, device):
        out = torch.empty(place.count, dtype=torch.float32, device=device)
        _native(device).fill_uniform(out, place, bits)
        return out.to(dtype)
    return ((words_at(place, 0, device) >> (32 - bits)).to(torch.float32) * 2.0**-bits).to(dtype)


def uniform_open(place: ElementPlace, device: torch.device) -> Tensor:
    """Return uniform numbers in (0, 1), without either end: float64, odd multiples of 2**-53."""
    return ((uniform(place, torch.float64, device) * 2.0**_OPEN_BITS).floor() + 0.5) * 2.0**-_OPEN_BITS


def normal(place: ElementPlace, device: torch.device) -> Tensor:
    """Return standard normal numbers, float64: quantiles of uniform ones."""
    return torch.special.ndtri(uniform_open(place, device))


def exponential(place: ElementPlace, device: torch.device) -> Tensor:
    """Return exponential numbers with the rate 1, float64, above 0."""
    return -uniform_open(place, device).log()


def integers(place: ElementPlace, low: int, high: int, device: torch.device) -> Tensor:
    """Return int64 numbers from `low` to below `high`; a range above 2**31 is drawn from 63 bits."""
    span = high - low
    first = words(place, 0, device)
    if span <= _SMALL_RANGE:
        return (first * span >> 32) + low
    both = (first << 31) | (words(place, 1, device) >> 1)
    return (both % span if span < 2**63 else both) + low
