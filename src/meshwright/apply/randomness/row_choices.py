"""Torch operators that choose rows by an index, seen from the first model on whose draws follow such rows."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright._torch_dispatch import also_replace, draws_untouched, is_fake_mode_on, is_transformed, run_once
from meshwright.apply.randomness.sites import choosing

__all__: list[str] = []

_aten = torch.ops.aten
_PLAIN: Final = (Tensor, nn.Parameter)
_OWN: Final = __name__.partition(".")[0]
_WHOLE: Final = (torch.int64, torch.int32)


@run_once
def watch_choices() -> None:
    """See choices of rows, from now on in this process: about ten microseconds for each, inside of `sites.in_step` alone."""
    also_replace(
        {
            "index.Tensor": _index,
            "index_select": _index_select,
            "masked_select": _masked_select,
            "gather": _gather,
            "take_along_dim": _take_along,
            "_pack_padded_sequence": _pack,
        }
    )


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
        if dims[0] == 0 and first.dim() == tensor.dim():
            _note_mask(tensor, result, first)
        else:
            _note(tensor, result, sizes=shape[dims[0] : dims[0] + first.dim()], indices=given, dim=dims[0])
    elif all(index.dtype in _WHOLE and index.shape == first.shape and index.dim() == 1 for index in given):
        _note(tensor, result, sizes=[shape[dim] for dim in dims], indices=given, dim=dims[0])
    return result


def _index_select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    with draws_untouched():
        result: Tensor = _aten.index_select.default(tensor, dim, index)
    if tensor.dim() and index.dim() == 1 and _is_plain(tensor, index):
        _note(tensor, result, sizes=[tensor.shape[dim]], indices=[index], dim=dim)
    return result


def _note(tensor: Tensor, result: Tensor, *, sizes: Sequence[int], indices: Sequence[Tensor], dim: int) -> None:
    """Remember a choice of rows; as for `ChosenRows.note`."""
    found = None if isinstance(tensor, nn.Parameter) else choosing()  # a table's rows are no samples'
    if found is not None:
        is_of_torch = _is_of_torch()
        found[0].note(found[1], tensor, result, sizes=sizes, indices=indices, dim=dim, is_of_torch=is_of_torch)


def _is_of_torch() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) == _OWN:
        frame = frame.f_back
    return _package_of(frame) == "torch"


def _package_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    with draws_untouched():
        result: Tensor = _aten.masked_select.default(tensor, mask)
    if _is_plain(tensor, mask):
        _note_mask(tensor, result, mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape)))
    return result


def _note_mask(tensor: Tensor, result: Tensor, mask: Tensor) -> None:
    """Note elements that a mask has chosen: rows, where it is the same for all elements of a row."""
    rows = _without_repeats(mask)
    _note_rows(tensor, result, mask, rows)
    if rows is mask and rows.dim() > 1 and rows.numel():
        with draws_untouched():  # repeated for the elements of a row in memory, too
            is_repeated = bool((rows == rows[..., :1]).all())
        if is_repeated:
            _note_rows(tensor, result, mask, rows.select(-1, 0))


def _note_rows(tensor: Tensor, result: Tensor, mask: Tensor, rows: Tensor) -> None:
    width = math.prod(mask.shape[rows.dim() :])
    if rows.dim() and width:
        _note(tensor, result.view(-1, width), sizes=rows.shape, indices=[rows], dim=0)


def _without_repeats(index: Tensor) -> Tensor:
    """Return an index without the last dims along which it was expanded."""
    while index.dim() > 1 and (index.shape[-1] == 1 or index.stride(-1) == 0):
        index = index.select(-1, 0) if index.shape[-1] else index.new_empty(0)
    return index


def _gather(tensor: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    with draws_untouched():
        result: Tensor = _aten.gather.default(tensor, dim, index, sparse_grad=sparse_grad)
    _note_places(tensor, result, dim, index)
    return result


def _take_along(tensor: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    with draws_untouched():
        result: Tensor = _aten.take_along_dim.default(tensor, indices, dim)
    if dim is not None:
        _note_places(tensor, result, dim, indices)
    return result


def _note_places(tensor: Tensor, result: Tensor, dim: int, index: Tensor) -> None:
    """Note elements that indices have chosen along the first dim: rows, where these are the same for all elements of a row."""
    rows = _without_repeats(index)
    if tensor.dim() and dim % tensor.dim() == 0 and rows.dim() == 1 and _is_plain(tensor, index):
        _note(tensor, result, sizes=[tensor.shape[0]], indices=[rows], dim=0)


def _pack(tensor: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    with draws_untouched():
        result, sizes = _aten._pack_padded_sequence.default(tensor, lengths, batch_first)
    found = choosing() if _is_plain(tensor) else None
    if found is not None:
        found[0].note_packing(found[1], tensor if batch_first else tensor.transpose(0, 1), result, sizes)
    return result, sizes


def note_elsewhere(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Remember what a function chooses that another pipeline stage runs: the rows may come here to draw.

    Args:
        func: The function, which was given stand-ins.
        args: Its arguments.
        kwargs: The like, by name.
        result: What stands for its result.
    """
    found = choosing() if func in _CHOOSES else None
    if found is None or not isinstance(result, Tensor):
        return
    tensor, dim, index = _row_index(func, args, kwargs)
    if index is None or isinstance(tensor, nn.Parameter):
        return
    if index is _UNKNOWN or not _is_plain(index):
        found[0].has_unseen = True
        return
    sizes = tensor.shape[: index.dim()] if index.dtype == torch.bool else [tensor.shape[dim]]
    found[0].note(found[1], tensor, result, sizes=sizes, indices=[index], dim=dim, is_of_torch=_is_of_torch())


_UNKNOWN: Final = object()
_CHOOSES: Final = {
    Tensor.__getitem__,
    *(
        getattr(own, name)
        for own in (Tensor, torch)
        for name in ("index_select", "masked_select", "gather", "take_along_dim")
    ),
}


def _row_index(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, int, Any]:
    """Return the tensor, the dim and the index of a choice of rows: None where it is none, `_UNKNOWN` one of another kind."""
    if func is Tensor.__getitem__:
        tensor, given = args
        is_one = isinstance(given, Tensor) and (
            (given.dtype == torch.bool and given.dim() > 0) or (given.dtype in _WHOLE and given.dim() == 1)
        )
        parts = given if isinstance(given, tuple) else (given,)
        other = _UNKNOWN if any(isinstance(part, (Tensor, list)) for part in parts) else None
        return tensor, 0, given if is_one else other
    if func in (Tensor.index_select, torch.index_select):
        given = dict(zip(("input", "dim", "index"), args, strict=False)) | dict(kwargs)
        chosen: Tensor = given["self" if "self" in given else "input"]
        return chosen, given["dim"] % max(1, chosen.dim()), given["index"]
    return args[0], 0, _UNKNOWN
