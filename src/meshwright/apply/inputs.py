"""Inputs of a layer that runs again in backward, where the layer writes over them: an activation in place comes first, say.

The caller sees what the layer wrote, as it does without recompute; the repetition is given copies of what was there before.
A layer's first forward finds out whether it needs them. Copies of the inputs take no more memory than what is written over.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.kept import tensors_in
from meshwright.comm._torch_private import pytree, without_dispatch_modes, without_function_modes
from meshwright.errors import ApplyError

__all__: list[str] = []

_FIX = "use recompute=none, or have the layer write into a copy: x = x.clone()"


class Writers:
    """What is known of the layers of a model: whether they write over what they are given."""

    def __init__(self) -> None:
        self._writes: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def begin(self, layer: nn.Module, args: Any, kwargs: Any) -> Inputs:
        """Return the inputs of a forward that is about to run."""
        return Inputs(args, kwargs, is_copied=self._writes.get(layer, True))

    def end(self, layer: nn.Module, inputs: Inputs, name: str) -> None:
        """Take note of what the forward has written, and refuse what cannot be repeated."""
        is_written = inputs.are_written()
        if is_written and not inputs.is_copied:
            raise ApplyError(
                f"{name} wrote over its inputs in place in this forward, and not in its first one: "
                "recompute has kept them, and would repeat the forward from other values",
                fix=_FIX,
            )
        if is_written or inputs.is_of_plain_tensors:
            self._writes[layer] = is_written or self._writes.get(layer, False)


class Inputs:
    """What a layer is given for one forward.

    Args:
        args: The positional arguments.
        kwargs: The others.
        is_copied: Whether a copy is made, for the repetition.
    """

    def __init__(self, args: Any, kwargs: Any, *, is_copied: bool) -> None:
        tensors = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
        plain = [tensor for tensor in tensors if _is_plain(tensor)]
        self.is_of_plain_tensors = all(_is_plain(tensor) or isinstance(tensor, nn.Parameter) for tensor in tensors)
        self.is_copied = is_copied and bool(plain)
        self.given = (args, kwargs)
        self._versions = [(tensor, tensor._version) for tensor in plain]
        self._before = [version for _, version in self._versions]
        self.kept = _copies(self.given) if self.is_copied else self.given

    def are_written(self) -> bool:
        """Tell whether something was written since, and let go of the inputs."""
        is_written = any(tensor._version != version for tensor, version in self._versions)
        self.given = ((), {})
        self._versions = []
        return is_written

    def again(self, layer: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return what a repetition is given: copies where it may write over them, and not leaves, which nothing may write."""
        if not self.is_copied:
            tensors = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
            if [tensor._version for tensor in tensors if _is_plain(tensor)] != self._before:
                raise ApplyError(
                    f"an input of {layer} was written over in place after its forward, which recompute repeats",
                    fix="use recompute=none, or write into a copy: x = x + y in place of x += y",
                )
            return args, kwargs
        with without_dispatch_modes(), without_function_modes():
            return pytree.tree_map_only(
                Tensor, lambda tensor: tensor.clone() if _is_plain(tensor) else tensor, (args, kwargs)
            )


def _copies(given: tuple[Any, Any]) -> tuple[Any, Any]:
    with without_dispatch_modes(), without_function_modes(), torch.no_grad():
        return pytree.tree_map_only(Tensor, _copy, given)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.requires_grad) if _is_plain(tensor) else tensor


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor can be written over and has a version; a parameter is no input, and cannot."""
    return type(tensor) is Tensor and not tensor.is_inference()
