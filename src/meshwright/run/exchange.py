"""The two small exchanges of a step: what the ranks bring, and what came out.

Both are vectors of a few float64 that are summed in the background: the first while forward runs, the second while backward
does. (Over shared memory at once, the first before forward, the second after backward.) They make everything that a step
decides a decision of all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.pipeline.post import OtherStageError
from meshwright.comm.communicator import Communicator, Pending
from meshwright.errors import ApplyError, MeshwrightError
from meshwright.run.autocast import code_of, raise_dtypes
from meshwright.run.circles import NUM_PARTS, Circle
from meshwright.run.loss import LossTerm
from meshwright.run.refusals import raise_first

__all__: list[str] = []

_NUM_COUNTS = 7
"""Numbers of a step's vector that are added up before what ranks must say alike [count]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saying:
    """Something that the ranks of a circle must say alike."""

    topic: str
    circle: Circle
    digest: int


class Agreement:
    """What all ranks bring to a step, summed.

    Args:
        group: All ranks that take the step.
        device: Where the vector lives.
        known_weight: Weight of this rank's micro-batches, were they means.
        num_samples: Samples of this rank's share [count].
        num_tokens: Tokens of this rank's share [count].
        wants_stop: Whether this rank was asked to stop.
        switched: A parameter whose `requires_grad` was switched on this rank, or None.
        broken: Why this rank cannot take the step, or None.
        num_passes: Micro-batches of this rank, where all ranks must run as many as any; else None [count].
        copies: Ranks of the group that bring the same share [count].
        sayings: What ranks must say alike; the same topics in the same order on every rank.
        on_difference: Called on every rank with the topics in which some ranks differ; it may exchange, repair, or raise.
        held: Gives `requires_grad` by FQN of what this rank holds, where ranks hold different parameters; else None.
        moved: Whether this rank's buffers were written to since the last step or evaluation ended.
        knows_first: Whether all ranks wait for this before they run a forward.
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
        broken: ApplyError | None,
        num_passes: int | None = None,
        copies: int = 1,
        sayings: Sequence[Saying] = (),
        on_difference: Callable[[list[str]], None] | None = None,
        held: Callable[[], dict[str, bool]] | None = None,
        moved: bool = False,
        knows_first: bool = True,
    ) -> None:
        self._group = group
        self._moved = moved
        self._knows_first = knows_first
        self._topics = [saying.topic for saying in sayings]
        self._on_difference = on_difference
        self._copies = copies
        self._device = device
        self._switched = switched
        self._broken = broken
        self._held = held
        flags = (wants_stop, switched is not None, broken is not None, moved)
        mine = [known_weight, float(num_samples), float(num_tokens), *map(float, flags)]
        for saying in sayings:
            mine += saying.circle.terms(saying.digest)
        self._num_fixed = len(mine)
        if num_passes is not None:
            # A sum cannot find a maximum: each rank has a place of its own.
            mine += [float(num_passes) if index == group.group_rank else 0.0 for index in range(group.size)]
        self._total: list[float] | None = mine if group.size == 1 else None
        if group.size > 1:
            self._vector = torch.tensor(mine, dtype=torch.float64, device=device)
            # Shared memory takes a few microseconds; to wake another thread for it would take longer.
            self._pending: Pending = group.all_reduce(self._vector, async_op=not group.shares_memory)
        elif broken is not None:
            raise broken

    def wait(self) -> list[float]:
        """Return the sums, once they are there.

        Raises:
            ApplyError: A rank cannot take the step, `requires_grad` was switched on some ranks only, or ranks that must say the
                same do not; on every rank.
        """
        if self._total is None:
            self._pending.wait()
            total = self._vector.tolist()
            if total[5]:
                self._raise_broken()
            if 0 < total[4] < self._group.size:
                self._refuse_switched()
            if 0 < total[6] < self._group.size and not self._knows_first:
                self._refuse_moved()
            self._total = total
            said = zip(self._topics, _in_parts(total[_NUM_COUNTS : self._num_fixed]), strict=True)
            different = [topic for topic, sums in said if any(sums)]
            if different and self._on_difference is not None:
                self._on_difference(different)
        return self._total

    def _raise_broken(self) -> None:
        reasons = self._group.all_gather_json(self._broken and self._broken.message, device=self._device)
        raise_first(reasons, self._broken, self._group.ranks)

    def _refuse_switched(self) -> None:
        if self._held is not None:
            states: dict[str, bool] = {}
            rows = self._group.all_gather_json(self._held(), device=self._device)
            if all(states.setdefault(name, state) == state for row in rows for name, state in row.items()):
                return  # all ranks that hold it agree
        names = self._group.all_gather_json(self._switched, device=self._device)
        ranks = [self._group.ranks[index] for index, name in enumerate(names) if name is not None]
        name = next(name for name in names if name is not None)
        raise ApplyError(
            f"requires_grad of '{name}' was switched on rank(s) {ranks} and not on the others of {self._group.size}",
            fix="switch it on every rank, between the same two steps",
        )

    def _refuse_moved(self) -> None:
        """Refuse buffers that follow rank 0 from this step on, where a rank that kept its own has run its forward already."""
        moved = self._group.all_gather_json(self._moved, device=self._device)
        ranks = [self._group.ranks[index] for index, is_moved in enumerate(moved) if is_moved]
        raise ApplyError(
            f"buffers were changed on rank(s) {ranks} of {self._group.size} alone since the last step or evaluation, by a "
            "forward that was called by hand or a write; buffers follow rank 0, and this step has begun without them",
            fix="call the model, or write into its buffers, on every rank alike, or use model.evaluate(batch)",
        )

    @property
    def known_weight(self) -> float:
        """Weight of all micro-batches of all ranks, were they means."""
        return self.wait()[0] / self._copies

    @property
    def num_samples(self) -> int:
        """Samples in the global batch [count]."""
        return round(self.wait()[1] / self._copies)

    @property
    def num_tokens(self) -> int:
        """Tokens in the global batch [count]."""
        return round(self.wait()[2] / self._copies)

    @property
    def num_passes(self) -> int:
        """The most micro-batches that any rank has, where the ranks were asked for it; else 0 [count]."""
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


def _in_parts(numbers: list[float]) -> list[list[float]]:
    return [numbers[start : start + NUM_PARTS] for start in range(0, len(numbers), NUM_PARTS)]


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
        in_background: Whether to start now; else the exchange is made in `wait`. All ranks say the same.
        is_trained: Whether a parameter of this rank is to get a gradient.
        failure: Why this rank cannot go on; the others hear of it here.
        is_alone: Whether it has stopped there, in its forward or its loss: what it is cannot be told, then.
        drain: Called on every rank where one has stopped: exchanges what some may have begun to exchange already.
    """

    def __init__(
        self,
        group: Communicator,
        device: torch.device,
        terms: Sequence[LossTerm],
        *,
        buffers_changed: bool = False,
        in_background: bool = False,
        is_trained: bool = False,
        failure: Exception | None = None,
        is_alone: bool = False,
        drain: Callable[[], None] | None = None,
    ) -> None:
        self._drain = drain
        num_means = sum(term.is_mean for term in terms)
        num_graphs = sum(term.value.requires_grad for term in terms)
        changed = math.inf if failure is not None else float(buffers_changed)
        stopped = group.ranks[group.group_rank] + 1.0 if is_alone else 0.0
        self._dtypes = [term.dtypes for term in terms]
        codes = [code_of(dtypes) for dtypes in self._dtypes]
        kinds = [sum(codes), sum(code * code for code in codes)]
        counts = [len(terms) - num_means, num_means, changed, num_graphs, is_trained, *kinds, stopped, is_alone]
        counts = torch.tensor(counts, dtype=torch.float64, device=device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        weight = torch.zeros((), dtype=torch.float64, device=device)
        for term in terms:
            loss_sum += term.total().to(device)
            weight += torch.as_tensor(term.weight).to(device)
        self._group = group
        self._failure = failure
        self._vector = torch.cat([torch.stack([loss_sum, weight]), counts])
        self._pending = group.all_reduce(self._vector, async_op=True) if in_background else None

    def wait(self) -> Sums:
        """Return the sums, once they are there.

        Raises:
            ApplyError: Some losses were means and some were sums, everything weighs nothing, a weight is not usable, no loss has
                a graph, or another rank has failed.
            Exception: The failure of this rank.
        """
        if self._pending is None:
            self._group.all_reduce(self._vector)
        else:
            self._pending.wait()
        loss_sum, weight, num_sums, num_means, changed, num_graphs, num_trained, *rest = self._vector.tolist()
        kinds, stopped = [round(number) for number in rest[:2]], rest[2:]
        if stopped[1]:
            self._raise_stopped(round(stopped[0]) - 1, round(stopped[1]))
        if math.isinf(changed):
            self._raise_failure()
        if (
            round(num_sums + num_means) * kinds[1] != kinds[0] ** 2
        ):  # equal for numbers that are all the same, and no others
            raise_dtypes(self._group, self._dtypes, self._vector.device)
        if num_sums and num_means:
            raise ApplyError(
                f"loss_fn returned meshwright.Loss for {num_sums:.0f} micro-batches and a plain scalar for {num_means:.0f} "
                "of one step; their weights cannot be compared",
                fix="return meshwright.Loss(sum, weight) always, or a mean always",
            )
        if math.isnan(weight):
            raise ApplyError(
                "loss_fn returned a meshwright.Loss whose weight is negative or NaN, on some rank",
                fix="return how much was summed as weight, at least 0; the sign of a loss belongs into its sum",
            )
        if math.isinf(weight):
            raise ApplyError(
                "the weight of a meshwright.Loss has a graph, or is infinite, on some rank; gradients are those of sum / weight "
                "with the weight held fixed",
                fix="return meshwright.Loss(sum, weight.detach()); a weight that is trained is not a count",
            )
        if weight == 0:
            raise ApplyError(
                "the weights of all micro-batches on all ranks add up to 0, so the loss of this step is 0 / 0",
                fix="leave out batches in which nothing counts (all labels ignored, say)",
            )
        if num_trained and not num_graphs:
            raise ApplyError(
                "no loss of this step has a graph, on any rank, while parameters require gradients: nothing would be trained",
                fix="compute the loss from the outputs themselves, without .detach(), .item() or torch.no_grad()",
            )
        return Sums(loss_sum, weight, bool(num_sums), bool(changed))

    def _raise_stopped(self, rank: int, count: int) -> NoReturn:
        if self._drain is not None:
            self._drain()
        if self._failure is not None:
            raise self._failure
        who = f"rank {rank}" if count == 1 else f"{count} ranks"
        raise ApplyError(
            f"{who} cannot go on: the model or its loss raised an exception there, and this step cannot be taken without it",
            fix=f"see the exception of {who}",
        )

    def _raise_failure(self) -> NoReturn:
        error = self._failure
        fix = error.fix if isinstance(error, ApplyError) else None
        mine = error and [
            isinstance(error, OtherStageError),
            f"{getattr(error, 'message', error)}",
            type(error).__name__,
            fix,
        ]
        told = self._group.all_gather_json(mine, device=self._vector.device)
        if error is not None and not isinstance(error, OtherStageError):
            self._raise_own(error, told)
        failed = [(entry[0], rank, entry) for rank, entry in enumerate(told) if entry is not None]
        _, rank, (_, message, kind, fix) = min(failed, key=lambda found: found[:2])
        name = "" if kind in ("ApplyError", "OtherStageError", "OtherWayError") else f"{kind}: "
        who = f"rank {self._group.ranks[rank]}"
        fix = fix or f"see the exception of {who}"
        raise ApplyError(f"{who} cannot go on: {name}{message}", fix=fix) from error

    def _raise_own(self, error: Exception, told: Sequence[list[Any] | None]) -> NoReturn:
        """Raise this rank's error; but what came of another stage's tensors is that stage's to explain."""
        ways = [(rank, entry) for rank, entry in enumerate(told) if entry is not None and entry[2] == "OtherWayError"]
        if isinstance(error, MeshwrightError) or not ways:
            raise error
        rank, (_, message, _, fix) = ways[0]
        raise ApplyError(f"rank {self._group.ranks[rank]} cannot go on: {message}", fix=fix) from error


def start_sums(
    engine: Engine,
    terms: Sequence[LossTerm],
    agreement: Agreement,
    *,
    is_trained: bool,
    failure: Exception | None,
    is_alone: bool = False,
) -> SumExchange:
    """Begin to sum the losses of all ranks; those that cannot go on have said so before.

    Args:
        engine: The strategy.
        terms: The losses of this rank's micro-batches.
        agreement: What the ranks bring to the step.
        is_trained: As for `SumExchange`, like the next ones.
        failure: Why this rank cannot go on.
        is_alone: Whether it stops at once.
    """
    agreement.wait()  # where a rank cannot go on, all say so here, before anything else is exchanged
    # Over shared memory it is quicker done once backward has ended than handed to another thread now; but not behind
    # gradients that some ranks have begun to exchange by then.
    later = engine.group.shares_memory and not engine.exchanges_in_backward
    return SumExchange(
        *(engine.loss_group, engine.device, terms),
        buffers_changed=engine.buffers_changed(),
        in_background=not later,
        is_trained=is_trained,
        failure=failure,
        is_alone=is_alone,
        drain=functools.partial(engine.finish_gradients, 1.0) if engine.may_stop_alone else None,
    )
