"""The two small exchanges of a step: what the ranks bring, and what came out.

Both are vectors of a few float64 that are summed in the background: the first while forward runs, the second while backward
does. They make everything that a step decides a decision of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from meshwright.comm.communicator import Communicator, Pending
from meshwright.errors import ApplyError
from meshwright.run.loss import LossTerm

__all__: list[str] = []


class Agreement:
    """What all ranks bring to a step, summed.

    Args:
        group: The data-parallel ranks.
        device: Where the vector lives.
        known_weight: Weight of this rank's micro-batches, were they means.
        num_samples: Samples of this rank's share [count].
        num_tokens: Tokens of this rank's share [count].
        wants_stop: Whether this rank was asked to stop.
        trainable_changed: Whether `requires_grad` was switched on this rank.
    """

    def __init__(
        self,
        group: Communicator,
        device: torch.device,
        *,
        known_weight: float,
        num_samples: int,
        num_tokens: int,
        wants_stop: bool,
        trainable_changed: bool,
    ) -> None:
        mine = [known_weight, float(num_samples), float(num_tokens), float(wants_stop), float(trainable_changed)]
        self._group = group
        self._mine = mine
        self._total: list[float] | None = mine if group.size == 1 else None
        if group.size > 1:
            self._vector = torch.tensor(mine, dtype=torch.float64, device=device)
            self._pending: Pending = group.all_reduce(self._vector, async_op=True)

    def wait(self) -> list[float]:
        """Return the sums, once they are there.

        Raises:
            ApplyError: `requires_grad` was switched on some ranks only.
        """
        if self._total is None:
            self._pending.wait()
            self._total = self._vector.tolist()
            changed = self._total[4]
            if 0 < changed < self._group.size:
                raise ApplyError(
                    f"requires_grad was switched on {changed:.0f} of {self._group.size} ranks "
                    f"({'on' if self._mine[4] else 'not on'} this one): the others would not train the same parameters",
                    fix="switch it on every rank, between the same two steps",
                )
        return self._total

    @property
    def known_weight(self) -> float:
        """Weight of all micro-batches of all ranks, were they means."""
        return self.wait()[0]

    @property
    def num_samples(self) -> int:
        """Samples in the global batch [count]."""
        return int(self.wait()[1])

    @property
    def num_tokens(self) -> int:
        """Tokens in the global batch [count]."""
        return int(self.wait()[2])

    @property
    def wants_stop(self) -> bool:
        """Whether any rank was asked to stop."""
        return self.wait()[3] > 0

    @property
    def trainable_changed(self) -> bool:
        """Whether `requires_grad` was switched, on every rank."""
        return self.wait()[4] > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """What the losses of all ranks add up to."""

    loss_sum: float
    weight: float
    has_sums: bool
    """Whether the losses were Loss objects (sums) rather than means."""
    buffers_changed: bool

    @property
    def loss(self) -> float:
        """Sum of losses over sum of weights."""
        return self.loss_sum / self.weight if self.weight else float("nan")

    @property
    def gradient_scale(self) -> float:
        """What the summed gradients must still be multiplied by."""
        return 1.0 / self.weight if self.has_sums else 1.0


class SumExchange:
    """Sums the losses of all ranks in the background.

    Args:
        group: The data-parallel ranks.
        device: Where the vector lives.
        terms: The losses of this rank's micro-batches.
        buffers_changed: Whether a forward wrote into a buffer on this rank.
    """

    def __init__(
        self, group: Communicator, device: torch.device, terms: Sequence[LossTerm], *, buffers_changed: bool
    ) -> None:
        num_means = sum(term.is_mean for term in terms)
        counts = torch.tensor([len(terms) - num_means, num_means, buffers_changed], dtype=torch.float64, device=device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        weight = torch.zeros((), dtype=torch.float64, device=device)
        for term in terms:
            loss_sum += term.total().to(device)
            weight += torch.as_tensor(term.weight).to(device)
        self._vector = torch.cat([torch.stack([loss_sum, weight]), counts])
        self._pending = group.all_reduce(self._vector, async_op=True)

    def wait(self) -> Sums:
        """Return the sums, once they are there.

        Raises:
            ApplyError: Some losses were means and some were sums, or everything weighs nothing.
        """
        self._pending.wait()
        loss_sum, weight, num_sums, num_means, changed = self._vector.tolist()
        if num_sums and num_means:
            raise ApplyError(
                f"loss_fn returned meshwright.Loss for {num_sums:.0f} micro-batches and a plain scalar for {num_means:.0f} "
                "of one step; their weights cannot be compared",
                fix="return meshwright.Loss(sum, weight) always, or a mean always",
            )
        if weight == 0:
            raise ApplyError(
                "the weights of all micro-batches on all ranks add up to 0, so the loss of this step is 0 / 0",
                fix="leave out batches in which nothing counts (all labels ignored, say)",
            )
        return Sums(loss_sum, weight, bool(num_sums), bool(changed))
