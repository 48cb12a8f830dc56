"""Results that a layer keeps from its forward, so that its repetition need not compute them (selective recompute).

A kept result is valid only while nothing writes over it. Writes of the layer itself are seen during its forward, through any
view. Later writes show in the version counters of the result and of its views. A result that was written over is computed again.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright._torch_private import DEAR_OPERATORS, TorchDispatchMode, detach_with_version, pytree, storage_id
from meshwright.errors import ApplyError

__all__: list[str] = []

_UNLIKE = "the forward of a layer that recompute runs again in backward does not do what it did the first time"


class _OperatorResult:
    """The result of one operator.

    Args:
        value: A tensor, or a structure of tensors and other values.
        given: The shapes of the operator's tensor arguments.
    """

    def __init__(self, value: Any, given: list[torch.Size]) -> None:
        self.given = given
        self._value: Any = pytree.tree_map_only(Tensor, detach_with_version, value)
        self._versions = [(tensor, tensor._version) for tensor in tensors_in(self._value)]

    def watch(self, view: Tensor) -> None:
        """Watch the version of another tensor of the same memory: not all views share their base's counter."""
        view = detach_with_version(view)
        self._versions.append((view, view._version))

    def forget(self) -> None:
        """Drop the tensors: the repetition computes them."""
        self._value = None
        self._versions = []

    def take(self) -> Any:
        """Return the value, once; None where it has been written over."""
        value = self._value if all(tensor._version == version for tensor, version in self._versions) else None
        self.forget()
        return value


class _Kept:
    """The kept results of one forward of a layer."""

    def __init__(self) -> None:
        self._results: dict[Any, list[_OperatorResult]] = collections.defaultdict(list)
        self._of_storage: dict[int, _OperatorResult] = {}

    def note(self, operator: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record an operator's call in the forward."""
        if self._of_storage:
            for tensor in _written(operator, args, kwargs):
                found = self._of_storage.pop(storage_id(tensor), None)
                if found is not None:
                    found.forget()
        if operator in DEAR_OPERATORS:
            entry = _OperatorResult(result, _shapes(args, kwargs))
            self._results[operator].append(entry)
            if _draws(operator, args, kwargs):
                entry.forget()
                return
            self._of_storage.update((storage_id(tensor), entry) for tensor in tensors_in(result))
        elif self._of_storage and _may_alias_unseen(operator):
            for tensor in tensors_in(result):
                found = self._of_storage.get(storage_id(tensor))
                if found is not None:
                    found.watch(tensor)

    def give(self, operator: Any, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an operator's kept result, or None where it has to run again."""
        results = self._results[operator]
        if index >= len(results) or results[index].given != _shapes(args, kwargs):
            name = str(operator).removesuffix(".default")
            raise ApplyError(
                f"{_UNLIKE}: {name}, call {index} of it, has inputs {list(map(tuple, _shapes(args, kwargs)))}, "
                + (
                    f"and had {list(map(tuple, results[index].given))}"
                    if index < len(results)
                    else "and was not called then"
                ),
                fix="use recompute=full or recompute=none",
            )
        return results[index].take()


class _Keeping(TorchDispatchMode):
    """The mode of the forward: it keeps results."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that what it compiles on its own account is one operator."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._kept.note(func, result, args, kwargs)
        return result


class _Giving(_Keeping):
    """The mode of the repetition: it returns kept results."""

    def __enter__(self) -> Any:
        self._calls: collections.Counter[Any] = collections.Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in DEAR_OPERATORS:
            return func(*args, **kwargs)
        index = self._calls[func]
        self._calls[func] += 1
        kept = self._kept.give(func, index, args, kwargs)
        return func(*args, **kwargs) if kept is None else kept


def keeping_contexts() -> tuple[Any, Any]:
    """Return the contexts of a forward and of its repetition, which keep expensive results."""
    kept = _Kept()
    return _Keeping(kept), _Giving(kept)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator or a layer."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Size]:
    return [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


@functools.cache
def _arguments(operator: Any) -> tuple[tuple[int, str, bool], ...]:
    """Return position, name and whether it is written, of each argument of an operator."""
    schema = getattr(operator, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple(
        (index, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for index, argument in enumerate(arguments)
    )


@functools.cache
def _writes(operator: Any) -> tuple[tuple[int, str], ...]:
    return tuple((index, name) for index, name, is_written in _arguments(operator) if is_written)


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for index, name in _writes(operator):
        yield from tensors_in(args[index] if index < len(args) else kwargs.get(name))


@functools.cache
def _may_alias_unseen(operator: Any) -> bool:
    """Tell whether a result may share memory with an argument, but not its version counter, such as aten._unsafe_view's."""
    return not getattr(operator, "is_view", False) and not _writes(operator)


@functools.cache
def _dropout_of(operator: Any) -> tuple[int, str] | None:
    return next(((index, name) for index, name, _ in _arguments(operator) if name == "dropout_p"), None)


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operator draws random numbers: if it were skipped, later draws of the repetition would differ."""
    place = _dropout_of(operator)
    if place is None:
        return False
    index, name = place
    return bool(args[index] if index < len(args) else kwargs.get(name, 0.0))
