"""Dropout by place: torch's composite operator does not reach one that draws where a tensor has no entries.

A rank without a unit of a layer (a head, a hidden feature) drops in an empty tensor there. Its later draws have the numbers of
the other ranks' only if this one is counted, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright._torch_dispatch import watch_empty_attention
from meshwright.apply.randomness.philox import shape_of
from meshwright.apply.randomness.sites import place_of_draw

__all__: list[str] = []


def native_dropout(bernoulli: Callable[..., Any], tensor: Tensor, p: float, train: bool | None) -> Any:
    """Return a tensor of which some entries are left out, and the mask; NotImplemented where torch draws or nothing is drawn.

    Args:
        bernoulli: Fills a tensor by place, or returns NotImplemented.
        tensor: What is dropped in.
        p: The share that is left out.
        train: Whether anything is.
    """
    if train is False or p == 0 or not tensor.numel():
        return NotImplemented
    mask = torch.empty(tensor.shape, dtype=torch.bool, device=tensor.device)
    if bernoulli(mask, 1 - p) is NotImplemented:
        return NotImplemented
    return tensor * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def dropout(bernoulli: Callable[..., Any], tensor: Tensor, p: float, train: bool) -> Any:
    """Return a tensor of which some entries are left out, as `native_dropout` takes it; an empty one is a call as well."""
    if tensor.device.type != "cpu" and tensor.numel() and train and 0 < p < 1:
        return torch.native_dropout(tensor, p, train)[0]
    noise = _noise(bernoulli, tensor, p, train)
    return noise if noise is NotImplemented else tensor * noise


def dropout_in_place(bernoulli: Callable[..., Any], tensor: Tensor, p: float, train: bool) -> Any:
    """Leave out entries of a tensor itself."""
    noise = _noise(bernoulli, tensor, p, train)
    return noise if noise is NotImplemented else tensor.mul_(noise)


def _noise(bernoulli: Callable[..., Any], tensor: Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1:
        return NotImplemented  # torch draws nothing then
    if not tensor.numel():
        _count_empty(shape_of(tensor))
        return NotImplemented
    noise = torch.empty_like(tensor, requires_grad=False)
    drawn = bernoulli(noise, 1 - p)
    return drawn if drawn is NotImplemented else drawn.div_(1 - p)


def watch_attention() -> None:
    """Count draws of attention that has no head on this rank, from now on in this process."""
    watch_empty_attention(_count_empty)


def _count_empty(shape: tuple[int, ...]) -> None:
    place_of_draw(shape, "bernoulli_")
