"""Result of one operator that a layer keeps, while nothing writes over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright._torch_private import detach_with_version, pytree
from meshwright.apply.recompute.foreign_writes import digest

__all__: list[str] = []


class OperatorResult:
    """The result of one operator.

    Args:
        value: A tensor, or a structure of tensors and other values.
        given: The shapes of the operator's tensor arguments.
        is_digested: Whether the values are looked at, too, before they are given.
    """

    def __init__(self, value: Any, given: list[torch.Size], *, is_digested: bool = False) -> None:
        self.given = given
        tensors = tensors_in(value)
        if any(tensor.is_inference() for tensor in tensors):  # they have no version, and no backward needs them
            value, tensors = None, []
        self._value = _detached(value)
        self._versions = [(tensor, tensor._version) for tensor in tensors_in(self._value)]
        self._digests = [digest(tensor) for tensor in tensors] if is_digested else []
        self._is_written = False

    def watch(self, view: Tensor) -> None:
        """Watch the version of another tensor of the same memory: not all views share their base's counter."""
        view = detach_with_version(view)
        self._versions.append((view, view._version))

    def forget(self) -> None:
        """Drop the tensors: the repetition computes them."""
        self._value = None
        self._versions = []
        self._digests = []

    def is_being_written(self) -> None:
        """Drop the value; the versions stay until `was_written_unseen` has compared them."""
        self._value = None
        self._is_written = True

    def was_written_unseen(self) -> bool:
        """Tell, after the forward, whether no version counter shows a write that the mode has seen."""
        if not self._is_written:
            return False
        is_unseen = self._has_versions()
        self.forget()
        return is_unseen

    def has_other_values(self) -> bool:
        """Tell whether the values have changed in a way that neither a version counter nor a mode shows."""
        if self._value is None or not self._digests or not self._has_versions():
            return False
        return [digest(tensor) for tensor in tensors_in(self._value)] != self._digests

    def take(self) -> Any:
        """Return the value, once; None where it has been written over."""
        value = self._value if self._has_versions() else None
        self.forget()
        return value

    def _has_versions(self) -> bool:
        return all(tensor._version == version for tensor, version in self._versions)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator or a layer."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _detached(value: Any) -> Any:
    """Return the result of an operator without its graph; its tensors share their version counters."""
    if isinstance(value, Tensor):
        return detach_with_version(value)
    if type(value) is tuple:
        return tuple(detach_with_version(one) if isinstance(one, Tensor) else one for one in value)
    return pytree.tree_map_only(Tensor, detach_with_version, value)
