"""Copies of modules and of their arguments, in which tensors are shared and everything else is new."""

from __future__ import annotations

import collections
import contextlib
import copy
import copyreg
import functools
import io
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.state.attributes import OF_TORCH
from meshwright.errors import ApplyError
from meshwright.trees import LEAVES, end_of_memory, map_tensors, memory_key, tensors_in, with_attributes

__all__: list[str] = []

_CONTAINERS = (list, tuple, dict, set, collections.OrderedDict, collections.deque)
_MAX_ENTRIES = 1_000
"""Of a container that may hold functions or modules; a larger one is data [count]."""
HOOKS = tuple(name for name in OF_TORCH if name.endswith("_hooks") and "state_dict" not in name)
"""Attributes of a module that hold its hooks, those of state dicts left out."""
_RULES_OF_COPIES = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
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
        for name, value in vars(child).items():
            if type(value) in (collections.OrderedDict, set) and not value:
                # Each module has a dozen tables of hooks and names, nearly all of them empty: deepcopy's slow way is not needed.
                memo[id(value)] = type(value)()
            elif type(value) not in LEAVES and name != "_modules":
                # Only leaves are copied, not tensors that hooks compute from parameters before a forward, or that a forward left.
                memo.update({id(tensor): tensor.detach() for tensor in tensors_in(value) if not tensor.is_leaf})
    try:
        made = _copy_modules(module, memo)
    except Exception as error:
        raise ApplyError(
            f"this plan tries the model out on copies of its modules, and copy.deepcopy failed: {error!r}",
            fix="leave such an attribute (a lock, an open file, a generator function's generator) out of copies in the module's "
            "__getstate__, or keep it outside of the model; or use tp=1",
        ) from error
    rebind(made, memo)
    return made


def _copy_modules(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return what copy.deepcopy returns, in half the time: attributes that are numbers, names or modules need no look."""
    plain = [child for child in module.modules() if _has_plain_copies(child)]
    twins = [child.__class__.__new__(child.__class__) for child in plain]
    memo.update({id(child): twin for child, twin in zip(plain, twins, strict=True)})
    for child, twin in zip(plain, twins, strict=True):
        state = child.__getstate__().items()
        twin.__setstate__({name: v if type(v) in LEAVES else copy.deepcopy(v, memo) for name, v in state})
    return copy.deepcopy(module, memo)


def _has_plain_copies(module: nn.Module) -> bool:
    """Tell whether copies of a module are made of copies of its attributes, by no rule of its class's own."""
    kind = type(module)
    return (
        not hasattr(kind, "__deepcopy__")
        and "__deepcopy__" not in vars(module)
        and kind not in copyreg.dispatch_table
        and all(getattr(kind, name) is getattr(nn.Module, name) for name in _RULES_OF_COPIES)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def rebind(module: nn.Module, memo: dict[int, Any]) -> None:
    """Let functions in attributes and hooks of a copy refer to copies: copy.deepcopy shares functions.

    Args:
        module: The copy.
        memo: id of each module, parameter and buffer that was copied -> its copy; further ones are added.
    """
    for twin in module.modules():
        own = vars(twin)
        for name, value in list(own.items()):
            if name in HOOKS:
                value.update({key: rebound(hook, memo) for key, hook in value.items()})
            elif name not in OF_TORCH:
                own[name] = rebound(value, memo)


def rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a value that refers to the copies of the objects it refers to; a patched forward calls the one it replaced.

    Functions are looked into (what they close over, and their defaults), and so are containers of them. One that reaches no copy
    stays itself.

    Args:
        value: A module, a tensor, a function, or a container of such; anything else stays itself.
        memo: id of an object -> its copy; further ones are added.
    """
    if isinstance(value, _PLAIN):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if not _reaches(value, memo):
        return value
    if isinstance(value, types.MethodType):
        return types.MethodType(rebound(value.__func__, memo), rebound(value.__self__, memo))
    if isinstance(value, functools.partial):
        named = {name: rebound(item, memo) for name, item in value.keywords.items()}
        return functools.partial(rebound(value.func, memo), *(rebound(item, memo) for item in value.args), **named)
    if isinstance(value, types.FunctionType):
        return _function(value, memo)
    if isinstance(value, (tuple, set)):
        return type(value)(rebound(item, memo) for item in value)
    made = memo[id(value)] = copy.copy(value)
    made.clear()
    if isinstance(value, dict):
        made.update({key: rebound(item, memo) for key, item in value.items()})
    else:
        made.extend(rebound(item, memo) for item in value)
    return made


def _reaches(value: Any, memo: dict[int, Any]) -> bool:
    """Tell whether a function or container refers to an object that was copied."""
    waiting, seen = _parts(value), {id(value)}
    while waiting:
        item = waiting.pop()
        if memo.get(id(item), item) is not item:
            return True
        if id(item) not in seen:
            seen.add(id(item))
            waiting += _parts(item)
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        named = value.__kwdefaults__ or {}
        return [*map(_content, value.__closure__ or ()), *(value.__defaults__ or ()), *named.values()]
    if type(value) in _CONTAINERS and len(value) <= _MAX_ENTRIES:
        return list(value.values() if isinstance(value, dict) else value)
    return []


def _function(value: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    cells = value.__closure__ or ()
    # A variable whose value reaches no copy stays common: what one function assigns, another reads.
    own = tuple(types.CellType() if _changes(_content(cell), value, memo) else cell for cell in cells)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, own)
    memo[id(value)] = made  # before its variables: two functions may reach each other
    for mine, cell in zip(own, cells, strict=True):
        if mine is not cell:
            mine.cell_contents = rebound(cell.cell_contents, memo)
    if value.__defaults__ is not None:
        made.__defaults__ = tuple(rebound(item, memo) for item in value.__defaults__)
    if value.__kwdefaults__ is not None:
        made.__kwdefaults__ = {name: rebound(item, memo) for name, item in value.__kwdefaults__.items()}
    made.__qualname__, made.__doc__, made.__module__ = value.__qualname__, value.__doc__, value.__module__
    vars(made).update(vars(value))
    return made


def _changes(content: Any, function: types.FunctionType, memo: dict[int, Any]) -> bool:
    return content is function or memo.get(id(content), content) is not content or _reaches(content, memo)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return None


def repeat_call(tree: Any, size: int, times: int, *, along_samples: bool) -> Any:
    """Return arguments with every dim of this size repeated: samples along dim 0, or positions along any other dim.

    In [batch, sequence, width] the positions are dim 1. A tensor that stands at several places does so again. Only a run shows
    whether the module accepts the result.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def repeat(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:  # with the original, so that its id stays its own
            made[id(tensor)] = tensor, repeated(tensor)
        return made[id(tensor)][1]

    def repeated(tensor: Tensor) -> Tensor:
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


def own_copy(batch: Any) -> Any:
    """Return a batch that a trial may write into: containers and tensors of its own; what shares memory there shares it here."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    shared = _shared_memory(batch)

    def clone(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:  # with the original, so that its id stays its own
            made[id(tensor)] = tensor, shared(tensor)
        return made[id(tensor)][1]

    return with_attributes(map_call(batch, clone), batch)


def _shared_memory(batch: Any) -> Callable[[Tensor], Tensor]:
    """Return what clones a tensor of the batch; clones of views of one memory are views of one memory."""
    groups: dict[Any, dict[int, Tensor]] = {}
    for tensor in tensors_in(batch):
        key = None if tensor.requires_grad else memory_key(tensor)
        if key is not None:
            groups.setdefault(key, {})[id(tensor)] = tensor
    views: dict[int, tuple[Tensor, int]] = {}
    for group in groups.values():
        if len(group) > 1:
            start = min(int(tensor.storage_offset()) for tensor in group.values())
            stop = max(end_of_memory(tensor) for tensor in group.values())
            memory = next(iter(group.values())).as_strided((stop - start,), (1,), start).clone()
            views |= {place: (memory, int(tensor.storage_offset()) - start) for place, tensor in group.items()}

    def clone(tensor: Tensor) -> Tensor:
        if id(tensor) in views:
            memory, start = views[id(tensor)]
            return memory.as_strided(tensor.shape, tensor.stride(), start)
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return clone
