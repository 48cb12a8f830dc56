"""Layers whose results hold what values decide beside the numbers in tensors: sizes, Python numbers, keys, how many there are.

Other stages find the results of a layer on made-up values. Where these give other ones than the first batch, the layer belongs to
the first stage, which tells the others each time.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.tracing.reads import looks_at_values
from meshwright.apply.pipeline.tracing.scene import Path
from meshwright.apply.pipeline.walking.remembered import Known, encode_results
from meshwright.apply.pipeline.walking.shapes import Shapes, make_twins
from meshwright.apply.pipeline.walking.stand_ins import Meta

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class _SeenCall:
    unit: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Known
    changes: bool
    """Whether it has changed anything beside its results, so that it does not begin again as it did."""


@dataclasses.dataclass(slots=True)
class Judged:
    """What was found of the layers of a model that look at values, by name."""

    told: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Whether values decide what a layer returns, beside numbers in tensors."""
    changes: dict[str, set[tuple[Path, Any]]] = dataclasses.field(default_factory=dict)
    """Attributes without tensors, as (place, key), that a layer changes for some values."""


class Lookers:
    """Layers of an observed forward whose code looks at values: a number that it reads, a mask, a choice."""

    def __init__(self) -> None:
        self.units: set[str] = set()
        """Their names."""
        self._seen: list[_SeenCall] = []

    def watch(self, unit: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a torch function that a layer calls."""
        if unit not in self.units and looks_at_values(func, args, kwargs):
            self.units.add(unit)

    def end(
        self, unit: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, *, changes: Any
    ) -> None:
        """Take note of a layer's call, its results, and what it changed beside them."""
        if unit in self.units:
            self._seen.append(_SeenCall(unit, layer, args, kwargs, encode_results(outputs), bool(changes)))

    def judge(self, module: nn.Module, judged: Judged) -> set[str]:
        """Return the layers of whose results other stages have to be told.

        Args:
            module: The model.
            judged: What was found in earlier forwards; it is extended.
        """
        fresh = [call for call in self._seen if call.unit not in judged.told]
        if fresh:
            shapes = Shapes(make_twins(module, [call.unit for call in fresh]), (), ())
            for call in fresh:
                guesses, changed = shapes.guesses(call.unit, call.layer, call.args, call.kwargs)
                differ = any(not _alike(guess.results, call.results.results) for guess in guesses)
                judged.told[call.unit] = judged.told.get(call.unit, False) or (differ and not call.changes)
                judged.changes.setdefault(call.unit, set()).update(changed)
        return {call.unit for call in self._seen if judged.told[call.unit]}

    def unsent(self, told: set[str]) -> Iterator[str]:
        """Yield the layers among these whose results cannot be sent: a function, an object of a class inside of a function."""
        for call in self._seen:
            if call.unit in told:
                try:
                    to_bytes(call.results)
                except Exception:  # noqa: BLE001 - a user's class may raise anything
                    yield call.unit

    def forget(self) -> None:
        """Hold no tensors any more."""
        self._seen = []


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two encoded results differ in numbers of tensors at most."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Meta):
        return (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, types.FunctionType):
        cells = ([cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other))
        return one.__code__ is other.__code__ and _alike(*cells)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return all(_alike(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other) if isinstance(one, _PLAIN) else True


_PLAIN = (bool, int, float, complex, str, bytes, set, frozenset, range, slice, np.generic)


def to_bytes(known: Known) -> bytes:
    """Encode a layer's results for the other stages.

    Raises:
        Exception: What pickle raises: there is something in them that only this process has.
    """
    return pickle.dumps(known.results)


def from_bytes(data: bytes, guess: Known) -> Known:
    """Decode what `to_bytes` gave; what the layer has written is as other stages have found it."""
    return Known(pickle.loads(data), guess.effects, guess.writes)  # noqa: S301 - the ranks of one job


def numbers_in(tree: Any) -> Iterator[float]:
    """Yield what results hold beside numbers in tensors: sizes, dtypes, Python numbers, texts and lengths, in containers too."""
    if isinstance(tree, Tensor):
        yield from tree.shape
        yield tree.requires_grad
        yield _number_of_dtype(tree.dtype)
    elif isinstance(tree, (list, tuple)):
        yield len(tree)
        for item in tree:
            yield from numbers_in(item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from numbers_in(key)
            yield from numbers_in(item)
    elif isinstance(tree, (int, float)):
        yield tree
    elif isinstance(tree, str):
        yield zlib.crc32(tree.encode())
    else:
        yield tree is None


@functools.cache
def _number_of_dtype(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())
