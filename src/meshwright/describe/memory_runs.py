"""Runs of memory: into how many loops an elementwise kernel falls where its tensors do not lie in one piece.

A kernel walks tensors that all lie in one piece as one run. Parts of a last dimension, as rotary embeddings take, and tensors
that are spread over others end a run at each row; the next one costs its start, however short it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.spec.operator import CAST

__all__: list[str] = []

_COPIES: Final = ("clone", "copy_", CAST)


def memory_runs(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the runs of a call of an operator; 0 where it is not elementwise [count].

    Args:
        func: The operator.
        inputs: Tensors that it is given.
        outputs: Its results, of which the first has the shape of the walk.
    """
    if torch.Tag.pointwise not in func.tags and func.__name__.partition(".")[0] not in _COPIES:
        return 0
    result = outputs[0]
    strides = [result.stride()]
    for tensor in inputs:
        if tensor.dim() and (spread := _spread_strides(tensor, result.shape)) is not None:
            strides.append(spread)
    return runs_of(result.shape, strides)


def _spread_strides(tensor: Tensor, shape: torch.Size) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is spread over a shape; None where it cannot be."""
    try:
        return tensor.expand(shape).stride()
    except RuntimeError:
        return None


def runs_of(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """Return into how many runs tensors of one shape fall, walked in the order of the first one's memory [count].

    Args:
        shape: Sizes of all of them.
        strides: Of each tensor, for each dimension [elements].
    """
    dims = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: strides[0][dim])
    runs, length = 1, 1
    for place, dim in enumerate(dims):
        if place and any(own[dim] != own[dims[0]] * length for own in strides):
            for rest in dims[place:]:
                runs *= shape[rest]
            break
        length *= shape[dim]
    return runs
