"""Layers whose results have sizes that their values decide: a mask or a choice inside of them.

Other stages find the sizes of a layer's results on made-up values. Where these do not give the sizes that the first batch has,
the layer belongs to the first stage, which tells the others each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from meshwright.apply.pipeline.tracing.reads import looks_at_values
from meshwright.apply.pipeline.walking.remembered import Known, encode_results
from meshwright.apply.pipeline.walking.shapes import Shapes, make_twins

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class _SeenCall:
    unit: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Known


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

    def end(self, unit: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Take note of a layer's call that wrote nothing outside of the layer."""
        if unit in self.units:
            self._seen.append(_SeenCall(unit, layer, args, kwargs, encode_results(outputs)))

    def find_sized(self, module: nn.Module, judged: dict[str, bool]) -> set[str]:
        """Return the layers whose results get other sizes from other values.

        Args:
            module: The model.
            judged: Layer -> what was found in earlier forwards; it is extended.
        """
        fresh = [call for call in self._seen if call.unit not in judged]
        if fresh:
            shapes = Shapes(make_twins(module, [call.unit for call in fresh]), (), ())
            for call in fresh:
                seen = _sizes_of(call.results)
                guesses = shapes.guesses(call.unit, call.layer, call.args, call.kwargs)
                judged[call.unit] = judged.get(call.unit, False) or any(_sizes_of(guess) != seen for guess in guesses)
        return {call.unit for call in self._seen if judged[call.unit]}

    def forget(self) -> None:
        """Hold no tensors any more."""
        self._seen = []


def _sizes_of(known: Known) -> list[tuple[int, ...]]:
    return [meta.shape for meta in known.metas]


def sizes_in(tree: Any) -> Iterator[int]:
    """Yield the sizes of all dims of the tensors in results: a tensor, or lists, tuples and mappings of these."""
    if isinstance(tree, Tensor):
        yield from tree.shape
    elif isinstance(tree, (list, tuple)):
        yield len(tree)
        for item in tree:
            yield from sizes_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from sizes_in(item)
