"""Layers whose results hold what values decide beside the numbers in tensors: sizes, Python numbers, keys, how many there are.

Other stages find the results of a layer on made-up values. Where these give other ones than the first batch, the layer belongs to
the first stage, which tells the others each time.
"""

from __future__ import annotations

import dataclasses
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from meshwright.apply.pipeline.tracing.functions import RANDOM
from meshwright.apply.pipeline.tracing.reads import looks_at_values
from meshwright.apply.pipeline.tracing.scene import DEEP, Path, places_of_call
from meshwright.apply.pipeline.walking.plain_facts import facts_in
from meshwright.apply.pipeline.walking.remembered import Known, encode_results
from meshwright.apply.pipeline.walking.shapes import Shapes, make_twins
from meshwright.apply.pipeline.walking.stand_ins import Meta, values_in
from meshwright.errors import ApplyError

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class _SeenCall:
    unit: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Known
    by_name: Known
    """The same, where a container that it was given is named."""
    changes: bool
    """Whether it has changed anything beside its results, so that it does not begin again as it did."""


@dataclasses.dataclass(slots=True)
class Judged:
    """What was found of the layers of a model that look at values, by name."""

    told: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Whether values decide what a layer returns, beside numbers in tensors."""
    changes: dict[str, set[tuple[Path, Any]]] = dataclasses.field(default_factory=dict)
    """Attributes without tensors, as (place, key), that a layer changes for some values."""
    outside: dict[str, dict[Any, str]] = dataclasses.field(default_factory=dict)
    """State outside of modules, as `Elsewhere.changed` names it, that a layer changes for some values."""


class Lookers:
    """Layers of an observed forward whose code looks at values: a number that it reads, a mask, a choice."""

    def __init__(self) -> None:
        self.units: set[str] = set()
        """Their names."""
        self.of_numbers: set[str] = set()
        """Layers that take numbers of other layers' tensors, not their sizes alone, or draw some."""
        self._seen: list[_SeenCall] = []

    def watch(self, unit: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a torch function that a layer calls; none of a tensor's size, dtype or device."""
        if unit not in self.of_numbers and (func in RANDOM or values_in((args, kwargs))):
            self.of_numbers.add(unit)
        if unit not in self.units and looks_at_values(func, args, kwargs):
            self.units.add(unit)

    def end(
        self, unit: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, *, changes: Any
    ) -> None:
        """Take note of a layer's call, its results, and what it changed beside them."""
        if unit in self.units:
            by_name = encode_results(outputs, places_of_call(args, kwargs, depth=DEEP))
            self._seen.append(_SeenCall(unit, layer, args, kwargs, encode_results(outputs), by_name, bool(changes)))

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
                guesses, changed, outside = shapes.guesses(call.unit, call.layer, call.args, call.kwargs)
                differ = any(not _alike(guess.results, call.by_name.results) for guess in guesses)
                judged.told[call.unit] = judged.told.get(call.unit, False) or (differ and not call.changes)
                judged.changes.setdefault(call.unit, set()).update(changed)
                judged.outside.setdefault(call.unit, {}).update(outside)
        return {call.unit for call in self._seen if judged.told[call.unit]}

    def unsent(self, told: set[str]) -> Iterator[str]:
        """Yield the layers among these whose results cannot be sent: a function, an object of a class inside of a function."""
        yield from (call.unit for call in self._seen if call.unit in told and not _can_be_sent(call.results))

    @property
    def offered(self) -> set[str]:
        """Layers that may be told, since they return more than tensors: a value that nobody has tried may change that."""
        kept = {call.unit for call in self._seen if call.changes or not _can_be_sent(call.results)}
        return {call.unit for call in self._seen if _holds_more(call.results.results)} - kept

    def forget(self) -> None:
        """Hold no tensors any more."""
        self._seen = []


def _can_be_sent(known: Known) -> bool:
    try:
        to_bytes(known)
    except ApplyError:
        return False
    return True


def _holds_more(tree: Any) -> bool:
    """Tell whether encoded results hold anything but tensors: `(h, None)` does not."""
    if isinstance(tree, (list, tuple)):
        return any(map(_holds_more, tree))
    if isinstance(tree, dict):
        return any(map(_holds_more, tree.values()))
    return not (tree is None or isinstance(tree, (Meta, Tensor)))


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
        pairs = [(getattr(one, f.name, None), getattr(other, f.name, None)) for f in dataclasses.fields(one)]
        return all(_alike(*pair) for pair in pairs)  # the shell of a user's own has none of its fields
    return facts_in(one) == facts_in(other)


def to_bytes(known: Known) -> bytes:
    """Encode a layer's results for the other stages.

    Raises:
        ApplyError: There is something in them that only this process has.
    """
    try:
        return pickle.dumps(known.results)
    except Exception as error:
        raise ApplyError(
            f"a layer returns, beside tensors, what cannot be sent to other stages ({type(error).__name__}: {error})",
            fix="return tensors, numbers, texts, or objects of classes that are defined in a module; or use pp=1",
        ) from error


def from_bytes(data: bytes, guess: Known) -> Known:
    """Decode what `to_bytes` gave; what the layer has written is as other stages have found it."""
    return Known(pickle.loads(data), guess.effects, guess.writes)  # noqa: S301 - the ranks of one job
