"""Agreement: the first small exchange of a step, which sums counts and flags of all ranks, and decides whether to take the step.

It is a vector of a few float64, summed in the background while forward runs; over shared memory it is summed before forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from meshwright.comm.communicator import Communicator, Pending
from meshwright.errors import ApplyError
from meshwright.run.sentinels.circles import NUM_PARTS, Circle

__all__: list[str] = []

_NUM_COUNTS = 9
"""Numbers of a step's vector that are added up before what ranks must say alike [count]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saying:
    """A value that all ranks of a circle must have alike."""

    topic: str
    circle: Circle
    digest: int


def told_of(error: ApplyError | None) -> list[str] | None:
    """Return what other ranks are told of an error, for `raise_first`."""
    return None if error is None else [error.message, error.fix or ""]


def raise_first(reasons: Sequence[list[str] | None], own: ApplyError | None, ranks: Sequence[int]) -> None:
    """Raise this rank's error, or one that names the first rank with a reason; nothing where no rank has one.

    Args:
        reasons: Why each rank cannot go on, and what helps, as `told_of` gives it; in the order of `ranks`.
        own: This rank's own error.
        ranks: The ranks' numbers in the world.
    """
    if own is not None:
        raise own
    found = next(((rank, reason) for rank, reason in zip(ranks, reasons, strict=True) if reason is not None), None)
    if found is not None:
        raise ApplyError(
            f"rank {found[0]} cannot take this step: {found[1][0]}",
            fix=found[1][1] or "change the model before apply_plan, on every rank",
        )


def refuse_switched(
    group: Communicator,
    device: torch.device,
    switched: str | None,
    held: Callable[[], dict[str, bool]],
    *,
    is_late: bool = False,
) -> None:
    """Refuse `requires_grad` that ranks have switched apart; every rank calls it, where any has switched some.

    Args:
        group: All ranks.
        device: For the exchange.
        switched: A parameter whose `requires_grad` was switched on this rank, or None.
        held: Gives `requires_grad` by FQN of what this rank holds: ranks may hold different parameters.
        is_late: Whether some ranks have run their forward without what others know.

    Raises:
        ApplyError: On every rank: it was switched on some ranks only, or otherwise.
    """
    rows = group.all_gather_json([switched, held()], device=device)
    states: dict[str, bool] = {}
    odd = [name for _, row in rows for name, state in row.items() if states.setdefault(name, state) != state]
    if not odd and not is_late:
        return  # all ranks that hold it agree, and all of them learn of it now
    ranks = [group.ranks[index] for index, (name, _) in enumerate(rows) if name is not None]
    if len(ranks) < group.size:
        name = next(name for name, _ in rows if name is not None)
        how = f"was switched on rank(s) {ranks} and not on the others of {group.size}"
    else:
        name = odd[0]
        on = [group.ranks[index] for index, (_, row) in enumerate(rows) if row.get(name)]
        how = f"was switched on some ranks of {group.size} only: it is True on rank(s) {on}"
    raise ApplyError(f"requires_grad of '{name}' {how}", fix="switch it on every rank, between the same two steps")


class Agreement:
    """Counts, flags and sayings of all ranks for one step, summed.

    Args:
        group: All ranks that take the step.
        device: Of the vector, where the group exchanges no CPU tensors.
        known_weight: Weight of this rank's micro-batches if their losses are means.
        num_samples: Samples of this rank's share [count].
        num_tokens: Tokens of this rank's share [count].
        wants_stop: Whether this rank was asked to stop.
        switched: A parameter whose `requires_grad` was switched on this rank, or None.
        held: Gives `requires_grad` by FQN of what this rank holds: ranks may hold different parameters.
        broken: Why this rank cannot take the step, or None.
        num_passes: Micro-batches of this rank, where all ranks must run as many as any; else None [count].
        readers: Ranks of the group that take each sample [count].
        sayings: Values that ranks must have alike; the same topics in the same order on every rank.
        on_difference: Called on every rank with the topics in which some ranks differ; it may exchange, repair, or raise.
        moved: Whether this rank's buffers were written to since the last step or evaluation ended.
        knows_first: Whether all ranks wait for this before they run a forward.
        has_changed: Whether the model on this rank is to be tried on parts of the batch again.
        has_news: Whether this rank has reasons that the others do not know.
        share: The number of this rank's share and of all shares, where ranks need the samples before theirs; else None [count].
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
        switched: str | None,
        held: Callable[[], dict[str, bool]],
        broken: ApplyError | None,
        num_passes: int | None = None,
        readers: int = 1,
        sayings: Sequence[Saying] = (),
        on_difference: Callable[[list[str]], None] | None = None,
        moved: bool = False,
        knows_first: bool = True,
        has_changed: bool = False,
        has_news: bool = False,
        share: tuple[int, int] | None = None,
    ) -> None:
        self._group = group
        self._moved = moved
        self._knows_first = knows_first
        self._topics = [saying.topic for saying in sayings]
        self._on_difference = on_difference
        self._readers = readers
        self._device = device
        self._switched = switched
        self._broken = broken
        self._held = held
        flags = (wants_stop, switched is not None, broken is not None, moved, has_changed, has_news)
        mine = [known_weight, float(num_samples), float(num_tokens), *map(float, flags)]
        for saying in sayings:
            mine += saying.circle.terms(saying.digest)
        self._share = share
        if share is not None:
            mine += [float(num_samples) if index == share[0] else 0.0 for index in range(share[1])]
        self._num_fixed = len(mine)
        if num_passes is not None:
            # A sum cannot find a maximum: each rank has a place of its own.
            mine += [float(num_passes) if index == group.group_rank else 0.0 for index in range(group.size)]
        self._total: list[float] | None = mine if group.size == 1 else None
        if group.size > 1:
            self._vector = torch.tensor(mine, dtype=torch.float64, device=group.message_device(device))
            # Shared memory takes a few microseconds, less than waking another thread.
            self._pending: Pending = group.all_reduce(self._vector, async_op=not group.shares_memory)
        elif broken is not None:
            raise broken

    def wait(self) -> list[float]:
        """Return the sums, once they are there.

        Raises:
            ApplyError: On every rank: a rank cannot take the step, `requires_grad` was switched on some ranks only, or sayings
                differ.
        """
        if self._total is None:
            self._pending.wait()
            total = self._vector.tolist()
            if total[5]:
                self._raise_broken()
            if total[4]:
                is_late = total[4] < self._group.size and not self._knows_first
                refuse_switched(self._group, self._device, self._switched, self._held, is_late=is_late)
            if 0 < total[6] < self._group.size and not self._knows_first:
                self._refuse_moved()
            self._total = total
            num_told = self._num_fixed - (0 if self._share is None else self._share[1])
            said = zip(self._topics, _in_parts(total[_NUM_COUNTS:num_told]), strict=True)
            different = [topic for topic, sums in said if any(sums)]
            if different and self._on_difference is not None:
                self._on_difference(different)
        return self._total

    def _raise_broken(self) -> None:
        reasons = self._group.all_gather_json(told_of(self._broken), device=self._device)
        raise_first(reasons, self._broken, self._group.ranks)

    def _refuse_moved(self) -> None:
        """Refuse buffers that follow rank 0 from this step on, if a rank has already run its forward with its own."""
        moved = self._group.all_gather_json(self._moved, device=self._device)
        ranks = [self._group.ranks[index] for index, is_moved in enumerate(moved) if is_moved]
        raise ApplyError(
            f"buffers were changed only on rank(s) {ranks} of {self._group.size} since the last step or evaluation, by a "
            "forward that was called by hand or a write (rule: buffers follow rank 0, and this step has begun with others)",
            fix="call the model, or write into its buffers, on every rank alike, or use model.evaluate(batch)",
        )

    @property
    def known_weight(self) -> float:
        """Weight of all micro-batches of all ranks if their losses are means."""
        return self.wait()[0] / self._readers

    @property
    def num_samples(self) -> int:
        """Samples in the global batch [count]."""
        return round(self.wait()[1] / self._readers)

    @property
    def num_before(self) -> int:
        """Samples of the global batch before this rank's share, where `share` was given; else 0 [count]."""
        if self._share is None:
            return 0
        own, num_shares = self._share
        first = self._num_fixed - num_shares
        return round(sum(self.wait()[first : first + own]) / self._readers)

    @property
    def num_tokens(self) -> int:
        """Tokens in the global batch [count]."""
        return round(self.wait()[2] / self._readers)

    @property
    def num_passes(self) -> int:
        """The largest number of micro-batches on any rank, where ranks report it; else 0 [count]."""
        return int(max(self.wait()[self._num_fixed :], default=0))

    @property
    def wants_stop(self) -> bool:
        """Whether any rank was asked to stop."""
        return self.wait()[3] > 0

    @property
    def buffers_moved(self) -> bool:
        """Whether buffers were changed between steps, on any rank."""
        return self.wait()[6] > 0

    @property
    def trainable_changed(self) -> bool:
        """Whether `requires_grad` was switched, on every rank."""
        return self.wait()[4] > 0

    @property
    def has_changed(self) -> bool:
        """Whether the model is to be tried again, on any rank."""
        return self.wait()[7] > 0

    @property
    def has_news(self) -> bool:
        """Whether any rank has reasons that the others do not know."""
        return self.wait()[8] > 0


def _in_parts(numbers: list[float]) -> list[list[float]]:
    return [numbers[start : start + NUM_PARTS] for start in range(0, len(numbers), NUM_PARTS)]
