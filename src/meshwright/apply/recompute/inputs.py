"""Inputs that a repeated layer writes over, for instance because an in-place activation comes first.

The caller sees the writes, as without recompute; the repetition gets copies of the original inputs. A layer's first forward
shows whether it needs copies. That compares the values too, since writes by `.data` or NumPy do not show in version counters.
Copies take no more memory than the inputs that are written over. Objects among the inputs (a cache of keys and values) are
copied without their tensors.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_dispatch import is_transformed
from meshwright._torch_private import pytree, without_dispatch_modes, without_function_modes
from meshwright.apply.modules.copies import copy_call
from meshwright.apply.recompute.foreign_writes import digest
from meshwright.apply.recompute.operator_results import tensors_in
from meshwright.errors import ApplyError

__all__: list[str] = []

_FIX = "use recompute=none, or have the layer write into a copy: x = x.clone()"


class Writers:
    """Record of which layers of a model write over their inputs."""

    def __init__(self) -> None:
        self._writes: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._compared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def begin(self, layer: nn.Module, args: Any, kwargs: Any, *, may_write_unseen: bool) -> Inputs:
        """Return the inputs for a forward that is about to run.

        Args:
            layer: The layer.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            may_write_unseen: Whether its code may write in a way that no version shows.
        """
        is_compared = (may_write_unseen or layer not in self._compared) and not is_transformed()
        self._compared.add(layer)
        return Inputs(args, kwargs, is_copied=self._writes.get(layer, True), is_compared=is_compared)

    def end(self, layer: nn.Module, inputs: Inputs, name: str) -> None:
        """Record the forward's writes, and refuse those that cannot be repeated."""
        is_written = inputs.are_written()
        if is_written and not inputs.is_copied:
            raise ApplyError(
                f"{name} wrote over its inputs in place in this forward, and not in its first one: recompute has kept them "
                "without a copy, and would repeat the forward from other values",
                fix=_FIX,
            )
        if is_written or inputs.is_of_plain_tensors:
            self._writes[layer] = is_written or self._writes.get(layer, False)


class Inputs:
    """The inputs of one forward of a layer.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        is_copied: Whether to keep a copy for the repetition.
        is_compared: Whether to compare values, too.
    """

    def __init__(self, args: Any, kwargs: Any, *, is_copied: bool, is_compared: bool = False) -> None:
        tensors = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
        plain = [tensor for tensor in tensors if _is_plain(tensor)]
        self.is_of_plain_tensors = all(_is_plain(tensor) or isinstance(tensor, nn.Parameter) for tensor in tensors)
        self.is_copied = is_copied and bool(plain)
        self.given = (args, kwargs)
        self._firsts = _firsts(tensors)
        self._versions = [(tensor, tensor._version) for tensor in plain]
        self._before = [version for _, version in self._versions]
        self._digests = [digest(tensor) for tensor in plain] if is_compared else []
        kept = _copies(self.given) if self.is_copied else self.given
        self.kept: tuple[Any, Any] = (copy_call(kept[0]), copy_call(kept[1]))
        """What the repetition gets: a cache among them is as it was before the first forward."""

    def are_written(self) -> bool:
        """Tell whether an input was written since, and drop the inputs."""
        is_written = any(tensor._version != version for tensor, version in self._versions)
        if self._digests and not is_written:
            is_written = [digest(tensor) for tensor, _ in self._versions] != self._digests
        self.given = ((), {})
        self._versions = []
        return is_written

    def again(self, layer: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs for a repetition: copies where it may write over them, never leaves, which cannot be written.

        A tensor that was passed twice is passed twice again, since attention checks whether its queries are its keys.
        """
        args, kwargs = copy_call(args), copy_call(kwargs)  # there may be another repetition
        tensors = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
        if not self.is_copied:
            if [tensor._version for tensor in tensors if _is_plain(tensor)] != self._before:
                raise ApplyError(
                    f"an input of {layer} was written over in place after its forward, which recompute repeats",
                    fix="use recompute=none, or write into a copy: x = x + y in place of x += y",
                )
            if self._firsts is None:
                return args, kwargs
        with without_dispatch_modes(), without_function_modes():
            now = [_clone(tensor) if self.is_copied and _is_plain(tensor) else tensor for tensor in tensors]
            places = iter(range(len(now)) if self._firsts is None else self._firsts)
            return pytree.tree_map_only(Tensor, lambda _: now[next(places)], (args, kwargs))


def _firsts(tensors: list[Tensor]) -> list[int] | None:
    """Return for each tensor the position of its first occurrence; None where each occurs once."""
    places: dict[int, int] = {}
    firsts = [places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
    return firsts if len(places) < len(tensors) else None


def _copies(given: tuple[Any, Any]) -> tuple[Any, Any]:
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _copy(tensor)
        return made[id(tensor)]

    with without_dispatch_modes(), without_function_modes(), torch.no_grad():
        return pytree.tree_map_only(Tensor, copy, given)


def _copy(tensor: Tensor) -> Tensor:
    return _clone(tensor).requires_grad_(tensor.requires_grad) if _is_plain(tensor) else tensor


def _clone(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; for tensors with gaps torch would pick other kernels, which save other tensors."""
    copy = tensor.clone()
    if tensor.layout != torch.strided or copy.stride() == tensor.stride():
        return copy
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    reach = 0  # extent of the dims so far, in elements
    for stride, size in sorted(zip(once.stride(), once.shape, strict=True)):
        if size > 1 and stride <= reach:
            return copy  # entries share memory: nothing can write into it
        reach += stride * (size - 1)
    alike = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device).copy_(once)
    return alike if once.shape == tensor.shape else alike.expand(tensor.shape)


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor can be written over and has a version; a parameter is not an input, and cannot."""
    return type(tensor) is Tensor and not tensor.is_inference()
