"""torch's counter of FLOPs, with attention over fewer key heads than queries on every supported torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from meshwright._torch_private import ATTENTIONS

__all__: list[str] = []


def make_flop_counter(more: Mapping[Any, Callable[..., int]] | None = None) -> FlopCounterMode:
    """Return a counter that prints nothing.

    Args:
        more: Operators that torch does not count -> a function of the arguments' shapes that gives their FLOPs.
    """
    counter = FlopCounterMode(display=False, custom_mapping={**_ATTENTION, **(more or {})})
    counter.mod_tracker = _NoModules()  # pyright: ignore[reportAttributeAccessIssue] - it is asked for these three alone
    return counter


class _NoModules:
    """Tracker of no modules: torch's own hooks gradients, and a layer that takes a gradient inside fails under its hooks."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _attention_flops(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """Count attention in which each key head serves several heads of the queries; shapes are [batch, heads, length, width]."""
    return sdpa_flop_count(query, (*query[:2], *key[2:]), (*query[:2], *value[2:]))


# torch 2.11 raises an AssertionError for such shapes in the kernels of GPUs.
_COUNTED = [operator.overloadpacket for operator in ATTENTIONS if operator.overloadpacket in flop_registry]
_ATTENTION: dict[Any, Callable[..., int]] = (
    dict.fromkeys(_COUNTED, _attention_flops) if torch.__version__ < "2.12" else {}
)


def recurrence_flops(data: Sequence[int], one: Sequence[int], other: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of one direction of an LSTM's layer, which torch does not count [FLOPs].

    Args:
        data: Shape of the inputs: steps, samples, width.
        one: Shape of the inputs' matrix.
        other: Shape of the state's matrix.
    """
    return 2 * data[0] * data[1] * (math.prod(one) + math.prod(other))
