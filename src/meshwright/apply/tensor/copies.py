"""Copies of modules and of what they are called with, in which tensors are shared and everything else is new."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.describe.tree import map_tensors

__all__: list[str] = []

_PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)


def copy_call(tree: Any) -> Any:
    """Return arguments as they are now: what a call writes into objects beside tensors (a cache) does not reach the copy."""
    if isinstance(tree, (Tensor, nn.Module, *_PLAIN)):
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(copy_call(item) for item in tree)
    if type(tree) is dict:
        return {key: copy_call(value) for key, value in tree.items()}
    return _copy_object(tree)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, (Tensor, nn.Module)):
            self.shared.append(obj)
            return len(self.shared) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]


def _copy_object(value: Any) -> Any:
    # Not copy.deepcopy: it refuses tensors that have a graph, and copies those that have none.
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
        file.seek(0)
        return _Unpickler(file, pickler.shared).load()
    except Exception:  # noqa: BLE001 - whatever an object's own pickling raises; it is then shared
        return value


def copy_module(module: nn.Module, new_tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are `new_tensor`'s; tied ones stay tied.

    Args:
        module: Left as it is.
        new_tensor: Gives the tensor that stands for a parameter or buffer.

    Raises:
        Exception: Whatever an attribute raises that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(new_tensor(parameter), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = new_tensor(buffer)
    for child in module.modules():
        for value in vars(child).values():  # what a hook computes from parameters before each forward
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    return copy.deepcopy(module, memo)


def map_call(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a fresh copy of arguments with a function applied to each tensor, also to those inside unknown objects."""
    if isinstance(tree, (Tensor, list, tuple, dict)):
        if type(tree) in (list, tuple):
            return type(tree)(map_call(item, function) for item in tree)
        if type(tree) is dict:
            return {key: map_call(value, function) for key, value in tree.items()}
        return map_tensors(tree, function)
    return map_tensors(copy_call(tree), function)
