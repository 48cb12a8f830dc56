"""Tensors of different products that meet entry by entry: where one is cut and the other is whole, they do not fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwright.apply.tensor.types.typed_run import name_of

__all__: list[str] = []

_BY_ENTRY = frozenset(["add", "sub", "mul", "div", "where", "maximum", "minimum", "lerp", "addcmul", "addcdiv"])
"""Names of functions that combine tensors entry by entry."""

_SIDE_BY_SIDE = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"])
"""Names of functions that put tensors side by side."""

_BY_OWN_SIZES = _SIDE_BY_SIDE | {"interpolate", "pad"}
"""Names of functions whose result is larger than what it is made of, though by no other tensor's shape."""


class Meetings:
    """Tensors that meet in a traced forward, by the products that they come from."""

    def __init__(self) -> None:
        self.found: set[tuple[frozenset[int], frozenset[int]]] = set()
        """Sources of two tensors that were put side by side, or combined entry by entry with one shape that no broadcast made."""
        self._spread: set[int] = set()  # tensors made larger since their products, maybe to another one's shape

    def note(
        self,
        func: Callable[..., Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        sources: Mapping[int, frozenset[int]],
    ) -> None:
        """Note which tensors meet in a call, and which have become larger.

        Args:
            func: The called function, which is no product.
            inputs: Tensors among its arguments.
            outputs: Tensors that it gave.
            sources: id of a tensor -> the products that it comes from. These tensors live as long as this.
        """
        given = [tensor for tensor in inputs if sources.get(id(tensor))]
        if not given:
            return
        name = name_of(func)
        is_spread = not self._spread.isdisjoint(map(id, given))
        largest = max(tensor.numel() for tensor in given)
        for tensor in outputs:
            if is_spread or (tensor.numel() > largest and name not in _BY_OWN_SIZES):
                self._spread.add(id(tensor))
        if name in _BY_ENTRY or name in _SIDE_BY_SIDE:
            alike = [t for t in given if name in _SIDE_BY_SIDE or t.shape == outputs[0].shape]
            own = {sources[id(tensor)] for tensor in alike if id(tensor) not in self._spread}
            self.found.update(itertools.permutations(own, 2))
