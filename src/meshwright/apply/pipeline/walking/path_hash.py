"""Hash of a forward's path. Stages compare it, since on different paths they would wait for each other forever."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshwright.apply.pipeline.walking.stand_ins import StageValue

__all__: list[str] = []

_MASK = 2**63 - 1


class Way:
    """Path of a forward on one stage: calls of layers, and the stage of each tensor between them.

    Args:
        micro_batch: The forward's.
        is_training: Whether the model is in training mode.
        counters: What the code between layers counts.
        shards: Parts into which layers may be cut on the stages that hold them: inside of these they run other code than
            elsewhere [count].
    """

    __slots__ = ("_hash", "_shards", "in_hook", "is_over", "last", "num_calls")

    def __init__(self, micro_batch: int, *, is_training: bool, counters: tuple[int, ...] = (), shards: int = 1) -> None:
        self._shards = shards
        self.num_calls = 0
        """Calls of layers so far [count]."""
        self.last = -1
        """Number of the last layer that was called."""
        self.in_hook = 0
        """Users' hooks that run now, one inside of the other: they are no part of the way."""
        self.is_over = False
        """Whether the model has returned: the loss is computed on the stages that have what it needs."""
        self._hash = hash(
            (micro_batch, is_training, *counters)
        )  # of numbers alone: a hash of text differs from process to process

    @property
    def digest(self) -> int:
        """The digest of the path so far, in the form that a note carries."""
        return self._hash & _MASK

    def call(self, number: int, stage: int, values: Iterable[StageValue]) -> None:
        """Record a layer's call on a stage, with its arguments."""
        if self.is_over or self.in_hook:
            return
        self.num_calls += 1
        self.last = number
        crossing = [_facts(value) for value in values if value.home != stage and value.home is not None]
        self._hash = hash((self._hash, number, stage, *crossing))

    def result(self, sizes: Iterable[int], facts: Iterable[float] = (), *, looks: bool, in_parts: bool = True) -> None:
        """Record what a layer's results hold: its stage has it from the values, others may have made it up.

        Where layers are cut, their stage may hold a part of a result: sizes count without the factors that the number of shards
        has. There they count for layers whose code looks at values alone.

        Args:
            sizes: Of the tensors.
            facts: What `facts_in` finds beside tensors.
            looks: Whether the layer's code looks at values.
            in_parts: Whether its stage may hold a part, where layers are cut.
        """
        if self.is_over or self.in_hook:
            return
        if self._shards > 1 and not looks:
            sizes = ()
        elif self._shards > 1 and in_parts:
            sizes = [_without_factors(size, self._shards) for size in sizes]
        self._hash = hash((self._hash, *sizes, *facts))

    def draw(self, *places: int) -> None:
        """Record the positions of generators from which all stages draw alike."""
        if not (self.is_over or self.in_hook):
            self._hash = hash((self._hash, *places))

    def between(self, home: int | None, values: Iterable[StageValue]) -> None:
        """Record code between layers, which runs on one stage or (None) on all."""
        if home is None or self.is_over or self.in_hook:
            return
        crossing = [_facts(value) for value in values if value.home != home and value.home is not None]
        if crossing or self._shards == 1:
            self._hash = hash((self._hash, home, *crossing))


def _without_factors(size: int, shards: int) -> int:
    while size and (shared := math.gcd(size, shards)) > 1:
        size //= shared
    return size


def _facts(value: StageValue) -> tuple[int, ...]:
    tensor = value.any
    return (value.home or 0, tensor.requires_grad, *tensor.shape)
