"""Order of work on each rank, for every kind of schedule.

[Note: stages of a rank] ``interleaved`` assigns the stages in turn (rank r has r, r + p, r + 2 p, ...). ``zbv`` lays them as a V
(rank r has r and 2 p - 1 - r), so the first and the last stage share a rank, and the loss is computed where the data is.

Sources: GPipe, Huang et al. 2019, arXiv:1811.06965. 1F1B, Narayanan et al. 2019 (PipeDream) and 2021, arXiv:2104.04473,
which also has the interleaved order. ZB-H1 and I/W, Qi et al. 2023, arXiv:2401.10241; ZB-V, Qi et al. 2024,
arXiv:2405.15362.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from meshwright.schedule.action import Action, ActionKind
from meshwright.schedule.halves import LATE, Order, join_halves, makespan, unit_cost
from meshwright.schedule.simulate import first_stuck, walk

__all__: list[str] = []

F: Final = ActionKind.FORWARD
B: Final = ActionKind.BACKWARD
I: Final = ActionKind.INPUT_GRAD  # noqa: E741 - the field's letter
W: Final = ActionKind.WEIGHT_GRAD


def gpipe_order(num_ranks: int, num_micro_batches: int) -> Order:
    """All forwards, then all backwards."""
    return [
        [Action(rank, kind, index) for kind in (F, B) for index in range(num_micro_batches)]
        for rank in range(num_ranks)
    ]


def one_f_one_b_order(num_ranks: int, num_micro_batches: int) -> Order:
    """As many forwards as there are stages behind, then one backward and one forward in turn."""
    order: Order = []
    for rank in range(num_ranks):
        forwards = [Action(rank, F, index) for index in range(num_micro_batches)]
        backwards = [Action(rank, B, index) for index in range(num_micro_batches)]
        order.append(_alternate(forwards, backwards, warmup=num_ranks - rank - 1))
    return order


def interleaved_order(num_ranks: int, num_micro_batches: int, virtual: int) -> Order:
    """1F1B over virtual stages: micro-batches pass in groups, each group through one chunk after the other.

    Groups have ``num_ranks`` micro-batches, or a few more where that does not divide. If the published warm-up then waits for
    itself, it is lengthened until nothing does; a warm-up of everything is GPipe.
    """
    num_groups = max(1, num_micro_batches // num_ranks)
    cuts = [index * num_micro_batches // num_groups for index in range(num_groups + 1)]
    groups = [range(start, stop) for start, stop in itertools.pairwise(cuts)]
    largest = max(len(group) for group in groups)
    chunks = range(virtual)
    longer = 0
    while True:
        order: Order = []
        for rank in range(num_ranks):
            forwards = [Action(c * num_ranks + rank, F, index) for group in groups for c in chunks for index in group]
            backwards = [
                Action(c * num_ranks + rank, B, index) for group in groups for c in reversed(chunks) for index in group
            ]
            warmup = 2 * (num_ranks - rank - 1) + (virtual - 1) * largest + longer
            order.append(_alternate(forwards, backwards, warmup=warmup))
        if first_stuck(walk(order, num_ranks * virtual, unit_cost), order) is None:
            return order
        longer += 1


def zb_h1_order(num_ranks: int, num_micro_batches: int) -> Order:
    """1F1B with backward in halves where that fills a bubble: rank r keeps r of its W for the end.

    Rank r runs the first r backwards in halves and leaves their W for the end. The last p backwards are in halves, too, where the
    ranks before it wait for their I. In between a W would follow its own I. That is a whole backward, which costs less than two
    halves (they read everything twice). No rank waits for rank 0, which has whole backwards only.

    No rank holds more than ``num_ranks`` micro-batches, the peak of 1F1B. With F = I = W = 1 and at least as many
    micro-batches as ranks, a step takes ``3 m + p - 1``; 1F1B takes ``3 m + 3 (p - 1)``.
    """
    order: Order = []
    for rank in range(num_ranks):
        warmup = min(num_micro_batches, num_ranks - rank)
        actions = [Action(rank, F, index) for index in range(warmup)]
        whole = range(num_micro_batches) if rank == 0 else range(rank, num_micro_batches - num_ranks + rank)
        put_off = [index for index in range(num_micro_batches) if index not in whole]
        late = deque(put_off)
        for index in range(num_micro_batches):
            if index in whole:
                actions.append(Action(rank, B, index))
            else:
                actions.append(Action(rank, I, index))
                if index >= rank:
                    actions.append(Action(rank, W, late.popleft()))
            if warmup + index < num_micro_batches:
                actions.append(Action(rank, F, warmup + index))
        actions.extend(Action(rank, W, index) for index in late)
        order.append(actions)
    return order


@functools.lru_cache(maxsize=256)
def zbv_order(num_ranks: int, num_micro_batches: int) -> Order:
    """Two stages a rank as a V, backward in halves, and no more activations than 1F1B.

    All ranks choose greedily, with F, I and W of equal length (`_RankOfV`), in two ways. In one, gradients of the V's first half
    come first. In the other, those of its second half do, and a forward of the first half leaves the last place to one of the
    second. The shorter schedule is taken; of two equally short ones that which messages lengthen less. Then halves that need not
    be apart are joined (`join_halves`). A rank holds at most ``2 p`` stages' activations, each half as large as those of 1F1B.

    With equal stages and ``m >= p`` a step takes ``6 m + p - 1`` (7 ranks, 9 micro-batches: one more); 1F1B takes
    ``6 m + 6 (p - 1)``.
    """
    candidates = [_greedy_v(num_ranks, num_micro_batches, spare=spare) for spare in (0, 1)]
    finished = [candidate for candidate in candidates if candidate is not None]
    best = min(finished, key=lambda order: tuple(makespan(order, 2 * num_ranks, send) for send in (0.0, LATE)))
    return join_halves(best, 2 * num_ranks)


def _greedy_v(num_ranks: int, num_micro_batches: int, *, spare: int) -> Order | None:
    ranks = [_RankOfV(rank, num_ranks, num_micro_batches, spare) for rank in range(num_ranks)]
    done: dict[Action, int] = {}
    slot = 0
    while any(len(rank.actions) < 6 * num_micro_batches for rank in ranks):
        chosen: list[Action] = []
        for rank in ranks:
            action = next((action for action in rank.candidates() if _is_ready(action, done, 2 * num_ranks)), None)
            if action is not None:
                rank.take(action)
                chosen.append(action)
        if not chosen:
            return None
        slot += 1
        done.update((action, slot) for action in chosen)
    return [rank.actions for rank in ranks]


class _RankOfV:
    """One rank of a V: its actions so far, and the next candidates.

    While forwards are left, a W follows its I directly: it frees memory for the next forward, and gives messages time to arrive.
    With fewer micro-batches than ranks there is memory for all, and W fills gaps.

    Args:
        rank: The rank.
        num_ranks: Ranks of the pipeline [count].
        num_micro_batches: Micro-batches of a step [count].
        spare: Places for activations that forwards of the V's first half leave free; with none, gradients of the first
            half come before those of the second [count].
    """

    def __init__(self, rank: int, num_ranks: int, num_micro_batches: int, spare: int) -> None:
        self.actions: list[Action] = []
        self._stages = (2 * num_ranks - 1 - rank, rank)
        self._num_micro_batches = num_micro_batches
        self._room = {self._stages[0]: 2 * num_ranks, self._stages[1]: 2 * num_ranks - spare}
        self._count = {(stage, kind): 0 for stage in self._stages for kind in (F, I, W)}
        self._has_room_for_all = num_micro_batches < num_ranks
        self._input_stages = self._stages if spare else self._stages[::-1]

    def candidates(self) -> Iterator[Action]:
        """Yield the possible next actions if their inputs were ready, best first."""
        held = sum(self._count[stage, F] - self._count[stage, W] for stage in self._stages)
        forwards = [
            Action(stage, F, self._count[stage, F])
            for stage in self._stages
            if held < self._room[stage] and self._count[stage, F] < self._num_micro_batches
        ]
        inputs = self._undone(I, after=F, stages=self._input_stages)
        weights = self._undone(W, after=I, stages=self._stages)
        has_forwards = any(self._count[stage, F] < self._num_micro_batches for stage in self._stages)
        if self._has_room_for_all or not has_forwards:
            return itertools.chain(inputs, forwards, weights)
        if self.actions and self.actions[-1].kind is F:
            return itertools.chain(weights, inputs, forwards)
        return itertools.chain(weights, forwards, inputs)

    def _undone(self, kind: ActionKind, *, after: ActionKind, stages: Sequence[int]) -> list[Action]:
        counts = ((stage, self._count[stage, kind]) for stage in stages)
        return [Action(stage, kind, count) for stage, count in counts if count < self._count[stage, after]]

    def take(self, action: Action) -> None:
        """Do it."""
        self._count[action.stage, action.kind] += 1
        self.actions.append(action)


def _is_ready(action: Action, done: dict[Action, int], num_stages: int) -> bool:
    stage, kind, index = action
    if kind is F:
        return stage == 0 or Action(stage - 1, F, index) in done
    if kind is I:
        return stage == num_stages - 1 or Action(stage + 1, I, index) in done
    return True


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int) -> list[Action]:
    """Return ``warmup`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    actions = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += (forward, backward)
    return actions + list(backwards[len(forwards) - warmup :])
