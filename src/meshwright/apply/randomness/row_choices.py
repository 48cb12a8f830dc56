"""Torch operators that choose rows by an index, seen from the first model on whose draws follow such rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from meshwright._torch_dispatch import also_replace, draws_untouched, is_fake_mode_on, is_transformed
from meshwright.apply.randomness.sites import note_choice

__all__: list[str] = []

_aten = torch.ops.aten
_PLAIN: Final = (Tensor, nn.Parameter)
_WHOLE: Final = (torch.int64, torch.int32)


@functools.cache
def watch_choices() -> None:
    """See choices of rows, from now on in this process: about ten microseconds for each, inside of `sites.in_step` alone."""
    also_replace({"index.Tensor": _index, "index_select": _index_select})


def _is_plain(*tensors: Tensor) -> bool:
    return not is_fake_mode_on() and not is_transformed() and all(type(tensor) in _PLAIN for tensor in tensors)


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    with draws_untouched():
        result: Tensor = _aten.index.Tensor(tensor, indices)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if not given or dims[-1] - dims[0] >= len(given) or not _is_plain(tensor, *given):
        return result
    first, shape = given[0], tensor.shape
    if first.dtype == torch.bool and len(given) == 1:
        note_choice(tensor, result, sizes=shape[dims[0] : dims[0] + first.dim()], indices=given, dim=dims[0])
    elif all(index.dtype in _WHOLE and index.shape == first.shape and index.dim() == 1 for index in given):
        note_choice(tensor, result, sizes=[shape[dim] for dim in dims], indices=given, dim=dims[0])
    return result


def _index_select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    with draws_untouched():
        result: Tensor = _aten.index_select.default(tensor, dim, index)
    if tensor.dim() and index.dim() == 1 and _is_plain(tensor, index):
        note_choice(tensor, result, sizes=[tensor.shape[dim]], indices=[index], dim=dim)
    return result
