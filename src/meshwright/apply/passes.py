"""Work that a step has an engine run: micro-batches, their losses, the roots of backward, and what ranks are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

__all__: list[str] = []

Root = tuple[Tensor, Tensor | None]
"""What backward runs from, and the gradient there; None stands for 1."""


class HasValue(Protocol):
    """The loss of a micro-batch, as far as an engine looks at it."""

    @property
    def value(self) -> Tensor:
        """The scalar that was computed, on the rank that computes it."""
        ...


TermT = TypeVar("TermT", bound=HasValue)


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of this rank's share that one forward takes."""

    batch: Any
    """What the user's batch is, with fewer samples."""
    weight: float | None = None
    """Weight of its loss, 0 where nothing in it counts; None where it is still to be found, as for a part of a micro-batch."""
    first: int = 0
    """The place of its first sample in the global batch, where random numbers go by it."""
    num_samples: int = 0
    """Its samples, where random numbers go by them [count]."""


class StepWork(Protocol[TermT]):
    """The work of one step, or of one evaluation, where gradients are off and no backward runs."""

    @property
    def micro_batches(self) -> Sequence[MicroBatch]:
        """The micro-batches of this rank, in their order; perhaps none."""
        ...

    @property
    def may_stop_alone(self) -> bool:
        """Whether a rank that stops in its forward or its loss can still tell the others."""
        ...

    def agree(self) -> int:
        """Wait until all ranks have agreed to take this step. An engine whose forwards wait for other ranks calls it first.

        Returns:
            The most micro-batches that any rank has, where the engine needs lockstep; else 0 [count].

        Raises:
            ApplyError: A rank cannot take the step; on every rank.
        """
        ...

    def loss_of(self, module: nn.Module, micro_batch: MicroBatch) -> TermT | None:
        """Run forward and loss; None where this rank has no part in the loss."""
        ...

    def root_of(self, term: TermT) -> Root | None:
        """Return what backward is run from for this loss; None where it trains nothing."""
        ...

    def end_losses(self, terms: Sequence[TermT]) -> None:
        """Take note that these are all losses of this rank: they are summed while the last backward runs."""
        ...

    def tell_failure(self, error: Exception, *, is_alone: bool) -> None:
        """Tell every rank why this one cannot go on. Raises `error` itself here, as a rule, and its account on the others.

        Args:
            error: The failure.
            is_alone: Whether this rank stops here and now, so that the others have to finish what they had begun with it.
        """
        ...
