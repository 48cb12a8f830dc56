"""Results that a layer keeps from its forward, so that its repetition need not compute them (selective recompute).

A kept result is valid only while nothing writes over it: one that was written over is computed again. Writes show in the version
counters of the result and of its views. Those through `.data` show in none, and those of NumPy in no operator either. So a
layer's first forward runs under a mode that sees every operator, and compares digests of the values. A layer that writes through
`.data`, or whose code says that it might, keeps the mode; one that writes past operators keeps nothing. All others pay for the
kept operators alone (ADR 0032).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright._torch_dispatch import KeptBy, keep_results, run_once
from meshwright._torch_private import (
    DEAR_OPERATORS,
    FakeTensor,
    TorchDispatchMode,
    storage_id,
    without_view,
)
from meshwright.apply.recompute.foreign_writes import may_write_past_operators, may_write_past_versions
from meshwright.apply.recompute.operator_results import OperatorResult, tensors_in
from meshwright.errors import ApplyError

__all__: list[str] = []


_UNLIKE = "the forward of a layer that recompute runs again in backward does not do what it did the first time"


class _Kept:
    """The kept results of one forward of a layer.

    Args:
        writes: What is known of the layer's writes.
    """

    def __init__(self, writes: UnseenWrites) -> None:
        self._writes = writes
        self._are_digested = not writes.are_known
        self._results: dict[Any, list[OperatorResult]] = collections.defaultdict(list)
        self._of_storage: dict[int, OperatorResult] = {}
        self._calls: collections.Counter[Any] = collections.Counter()
        self._has_other_views = False
        self._is_over = False
        self._num_repetitions = 0  # under way: one begins before the forward is over, where that computes a gradient

    def note(self, operator: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record an operator's call in the forward."""
        if self._num_repetitions:
            return
        if self._of_storage:
            for tensor in _written(operator, args, kwargs):
                found = self._of_storage.pop(storage_id(tensor), None)
                if found is not None:
                    found.is_being_written()
        if operator in DEAR_OPERATORS:
            if _have_values(args):
                self._hold(operator, result, args, kwargs)
        elif self._of_storage and _may_alias_unseen(operator) and self._watch(result):
            self._has_other_views |= operator is not without_view

    def keep(self, operator: Any, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the forward, which is kept or makes a view."""
        result = self.run(operator, run, args, kwargs)
        if operator is without_view:  # its result lies in its argument's memory, with a version counter of its own
            if self._of_storage:
                self._watch(result)
        elif _have_values(args):
            self._hold(operator, result, args, kwargs)
        return result

    def run(self, operator: Any, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the forward; a call that raises is counted too, since the repetition makes it again."""
        try:
            return run()
        except Exception:
            if operator in DEAR_OPERATORS and _have_values(args) and not self._num_repetitions:
                self._results[operator].append(OperatorResult(None, _shapes(args, kwargs)))
            raise

    def give(self, operator: Any, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an operator's result in the repetition: the kept one, or a new one where there is none."""
        if operator not in DEAR_OPERATORS or not _have_values(args):
            return run()
        index = self._calls[operator]
        self._calls[operator] += 1
        kept = self._take(operator, index, args, kwargs)
        return run() if kept is None else kept

    def begin_repetition(self) -> None:
        """Count calls from the first one on."""
        self._calls.clear()
        self._num_repetitions += 1

    def end_repetition(self) -> None:
        """Go on with the forward, where it is not over."""
        self._num_repetitions -= 1

    def end_forward(self) -> None:
        """Expect no more calls in a repetition than there were until now."""
        self._is_over = True

    def tell_writes(self) -> None:
        """Record, after the forward, whether it wrote over a result, or could, in a way that no version counter shows."""
        entries = [entry for entries in self._results.values() for entry in entries]
        unseen = [entry.was_written_unseen() for entry in entries]  # all are told
        self._writes.are_there |= self._has_other_views or any(unseen)
        for entry in entries:
            if entry.has_other_values():
                entry.forget()
                self._writes.are_foreign = True

    def _hold(self, operator: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        draws = _draws(operator, args, kwargs)
        entry = OperatorResult(result, _shapes(args, kwargs), is_digested=self._are_digested and not draws)
        self._results[operator].append(entry)
        if draws:
            entry.forget()
            return
        self._of_storage.update((storage_id(tensor), entry) for tensor in tensors_in(result))

    def _watch(self, result: Any) -> bool:
        """Watch a result that lies in the memory of a kept one; tell whether it does."""
        found = [(tensor, self._of_storage.get(storage_id(tensor))) for tensor in tensors_in(result)]
        for tensor, entry in found:
            if entry is not None:
                entry.watch(tensor)
        return any(entry is not None for _, entry in found)

    def _take(self, operator: Any, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = self._results[operator]
        if index >= len(results) and not self._is_over:
            return None
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
        if results[index].has_other_values():  # the model has written over a result of the layer after its forward
            results[index].forget()
            self._writes.are_foreign = True
        return results[index].take()


class _KeptMode(TorchDispatchMode):
    """A mode around a forward, or its repetition, that sees every operator."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that what it compiles on its own account is one operator."""
        return True


class _Keeping(_KeptMode):
    """The mode of a forward: it keeps results, and sees every write."""

    def __init__(self, kept: _Kept, writes: UnseenWrites) -> None:
        super().__init__(kept)
        self._writes = writes

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._kept.end_forward()
        self._kept.tell_writes()
        self._writes.are_known = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._kept.run(func, functools.partial(func, *args, **kwargs), args, kwargs)
        self._kept.note(func, result, args, kwargs)
        return result


class _Giving(_KeptMode):
    """The mode of the repetition after `_Keeping`: it returns kept results."""

    def __enter__(self) -> Any:
        self._kept.begin_repetition()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._kept.end_repetition()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._kept.give(func, functools.partial(func, *args, **(kwargs or {})), args, kwargs or {})


class UnseenWrites:
    """Whether a layer writes over results in ways that no version counter shows; its code and its forwards under the mode tell.

    Args:
        names: The names that its code looks up.
    """

    def __init__(self, names: set[str] | None = None) -> None:
        self.are_known = False
        self.are_there = may_write_past_versions(names or set())
        """Whether it writes by operators, past version counters."""
        self.are_foreign = may_write_past_operators(names or set())
        """Whether it writes past operators, too: nothing can be kept."""


def keeping_contexts(writes: UnseenWrites, *, sees_all: bool = False) -> tuple[Any, Any]:
    """Return the contexts of a forward and of its repetition, which keep expensive results.

    Args:
        writes: What is known of the layer's writes.
        sees_all: Whether every operator is looked at; so it is until writes are known.
    """
    kept = _Kept(writes)
    if sees_all or writes.are_there or not writes.are_known:
        return _Keeping(kept, writes), _Giving(kept)
    _hand_over()
    return _KeepingByKey(kept), _GivingByKey(kept)


class _KeepingByKey(KeptBy):
    """The context of a forward whose writes are known."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__(kept.keep)
        self._kept = kept

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._kept.end_forward()


class _GivingByKey(KeptBy):
    """The context of the repetition after such a forward."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__(kept.give)
        self._kept = kept

    def __enter__(self) -> None:
        self._kept.begin_repetition()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._kept.end_repetition()


@run_once
def _hand_over() -> None:
    """Register the operators with the dispatcher, once in this process."""
    operators = [*DEAR_OPERATORS, without_view]
    keep_results({str(operator).removeprefix("aten.").removesuffix(".default"): operator for operator in operators})


def _have_values(args: tuple[Any, ...]) -> bool:
    """Tell whether a call is one of the forward's own; a compiler's trial of it is not. Both runs count the same calls."""
    return not any(isinstance(arg, FakeTensor) or arg.is_meta for arg in args if isinstance(arg, Tensor))


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
