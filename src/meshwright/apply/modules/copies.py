"""Copies of modules and of their arguments, in which tensors are shared and everything else is new."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ApplyError
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

_PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)


def copy_call(tree: Any) -> Any:
    """Return a copy of arguments, so that a call's writes into objects other than tensors (a cache) do not reach them."""
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
    # Not copy.deepcopy, which refuses tensors with a graph and copies the others.
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
        file.seek(0)
        return _Unpickler(file, pickler.shared).load()
    except Exception:  # noqa: BLE001 - whatever an object's own pickling raises; it is then shared
        return value


@contextlib.contextmanager
def sharing_attributes(module: nn.Module, copied: nn.Module) -> Iterator[None]:
    """Have a module hold what its copy holds inside: a loss that reads attributes of the module sees what the copy left there."""
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for (_, own), (_, twin) in zip(list(module.named_modules()), list(copied.named_modules()), strict=True):
            if own is not twin:
                kept.append((own, vars(own)))
                object.__setattr__(own, "__dict__", vars(twin))
        yield
    finally:
        for own, attributes in kept:
            object.__setattr__(own, "__dict__", attributes)


def copy_module(module: nn.Module, new_tensor: Callable[[Tensor], Tensor], *, trainable: bool = False) -> nn.Module:
    """Return a copy of a module with `new_tensor`'s parameters and buffers; tied ones stay tied.

    Args:
        module: The module; it is not changed.
        new_tensor: Returns the tensor that replaces a parameter or buffer.
        trainable: Whether every parameter that can require a gradient does so in the copy, frozen ones too.

    Raises:
        ApplyError: An attribute cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        can_be = trainable and (parameter.is_floating_point() or parameter.is_complex())
        memo[id(parameter)] = nn.Parameter(new_tensor(parameter), requires_grad=parameter.requires_grad or can_be)
    for buffer in module.buffers():
        memo[id(buffer)] = new_tensor(buffer)
    for child in module.modules():
        # Only leaves are copied, not tensors that hooks compute from parameters before a forward, or that a forward left.
        for value in tensors_in(list(vars(child).values())):
            if not value.is_leaf:
                memo[id(value)] = value.detach()
        for value in vars(child).values():
            # Each module has a dozen tables of hooks and names, nearly all of them empty: deepcopy's slow way is not needed.
            if type(value) in (collections.OrderedDict, set) and not value:
                memo[id(value)] = type(value)()
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise ApplyError(
            f"this plan tries the model out on copies of its modules, and copy.deepcopy failed: {error!r}",
            fix="leave such an attribute (a lock, an open file, a generator function's generator) out of copies in the module's "
            "__getstate__, or keep it outside of the model; or use tp=1",
        ) from error
    for twin in made.modules():
        for key, value in list(vars(twin).items()):
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                vars(twin)[key] = rebound(value, memo)
    return made


def rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a function that refers to the copies of the objects it refers to; a patched forward calls the one it replaced."""
    if isinstance(value, (nn.Module, Tensor)):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        function, owner = rebound(value.__func__, memo), rebound(value.__self__, memo)
        is_same = function is value.__func__ and owner is value.__self__
        return value if is_same else types.MethodType(function, owner)
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        function, *given = [rebound(item, memo) for item in parts]
        if all(new is old for new, old in zip([function, *given], parts, strict=True)):
            return value
        num_args = len(value.args)
        named = dict(zip(value.keywords, given[num_args:], strict=True))
        return functools.partial(function, *given[:num_args], **named)
    if not isinstance(value, types.FunctionType) or not value.__closure__ or id(value) in memo:
        return memo.get(id(value), value)
    memo[id(value)] = value  # two functions may reach each other
    try:
        contents = [cell.cell_contents for cell in value.__closure__]
    except ValueError:  # a variable without a value yet: a recursive function that is being copied
        return value
    reached = [item if item is value else rebound(item, memo) for item in contents]
    if all(new is old for new, old in zip(reached, contents, strict=True)):
        return value
    cells = tuple(types.CellType(item) for item in reached)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__ = value.__kwdefaults__, value.__qualname__
    vars(made).update(vars(value))
    memo[id(value)] = made
    return made


def repeat_call(tree: Any, size: int, times: int, *, along_samples: bool) -> Any:
    """Return arguments with every dim of this size repeated: samples along dim 0, or positions along any other dim.

    In [batch, sequence, width] the positions are dim 1. Only a run shows whether the module accepts the result.
    """

    def repeat(tensor: Tensor) -> Tensor:
        if along_samples:
            dims = [0] if tensor.dim() and tensor.shape[0] == size else []
        elif tensor.dim() == 3 and tensor.is_floating_point():
            dims = [1] if tensor.shape[1] == size else []
        else:
            dims = [dim for dim, have in enumerate(tensor.shape) if have == size and (dim or tensor.dim() == 1)]
        if not dims:
            return tensor
        repeats = [times if dim in dims else 1 for dim in range(tensor.dim())]
        return tensor.detach().repeat(repeats).requires_grad_(tensor.requires_grad)

    return map_call(tree, repeat)


def map_call(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a fresh copy of arguments with a function applied to each tensor, even inside unknown objects."""
    if isinstance(tree, (Tensor, list, tuple, dict)):
        if type(tree) in (list, tuple):
            return type(tree)(map_call(item, function) for item in tree)
        if type(tree) is dict:
            return {key: map_call(value, function) for key, value in tree.items()}
        return map_tensors(tree, function)
    return map_tensors(copy_call(tree), function)
