"""Choice of the backwards that run in halves: only those that shorten the step.

A backward in halves costs more than a whole one, since its inputs have left the caches by its second half. So a schedule
written in I and W is revised once, and halves for which no action waits are joined.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

from meshwright.schedule.action import Action, ActionKind
from meshwright.schedule.simulate import walk

__all__: list[str] = []

Order = list[list[Action]]
LATE: Final = 0.1
"""How long a message takes where schedules that are equally short without messages are compared [forwards]."""

# Backward costs twice the forward: one product for the inputs' gradient and one for the weights'.
# Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2 and appendix.
_UNIT_COSTS: Final = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_APART: Final = 1.1
"""What each half costs if it runs by itself [forwards]. Measured on GPT layers of width 256 and 512: 1.1 to 1.2."""
_MOST_ACTIONS: Final = 30_000
_FEWEST_WALKS: Final = 24
"""How long halves are looked for: so many actions are walked through in all, a third of a second, or so many times through the
whole order where it is long [count]."""

_Slot = tuple[int, int]


def unit_cost(action: Action) -> float:
    """Return the duration of an action if F = I = W = 1 and B = 2."""
    return _UNIT_COSTS[action.kind]


def makespan(order: Order, num_stages: int, send: float) -> float:
    """Return the duration of an order at unit costs; a message takes `send` [forwards]."""
    return max(times[-1][1] for times in walk(order, num_stages, unit_cost, send))


def join_halves(order: Order, num_stages: int) -> Order:
    """Return the order with a B in place of an I and the W after it, wherever the step is not longer for it.

    Any W of the stage can be joined: those of micro-batches that stay in halves fill the remaining slots in the same order, so
    each rank holds as many micro-batches at each time as before.

    Args:
        order: [rank][slot] -> action, without B.
        num_stages: Stages over all ranks [count].
    """
    # Blocks of actions at the same time on all ranks, since the ends of a step may not allow what its middle does.
    pairs = sorted(_pairs(order), key=lambda pair: (order[pair[0]][pair[1]].stage < num_stages // 2, pair[1]))
    joined: set[_Slot] = set()
    limit = makespan(order, num_stages, 0.0)
    best = _length(order, num_stages)
    walks = max(_FEWEST_WALKS, _MOST_ACTIONS // sum(len(row) for row in order))
    blocks = deque([pairs])
    while blocks and walks:
        block = blocks.popleft()
        tried = _with_joined(order, joined | set(block))
        walks -= 1
        length = _length(tried, num_stages)
        if length <= best and makespan(tried, num_stages, 0.0) <= limit:
            joined.update(block)
            best = length
        elif len(block) > 1:
            half = len(block) // 2
            blocks += (block[:half], block[half:])
    return _with_joined(order, joined)


def _length(order: Order, num_stages: int) -> float:
    """Return the duration of an order, with messages and the cost of halves; sums of tenths, so rounded."""

    def cost(action: Action) -> float:
        return unit_cost(action) * (_APART if action.kind in ("I", "W") else 1.0)

    return round(max(times[-1][1] for times in walk(order, num_stages, cost, LATE)), 6)


def _pairs(order: Order) -> list[_Slot]:
    """Return the (rank, slot) of each I that a W of its stage follows directly."""
    return [
        (rank, slot)
        for rank, row in enumerate(order)
        for slot, (action, following) in enumerate(itertools.pairwise(row))
        if action.kind == "I" and following.kind == "W" and action.stage == following.stage
    ]


def _with_joined(order: Order, joined: set[_Slot]) -> Order:
    return [_join_row(row, {slot for at, slot in joined if at == rank}) for rank, row in enumerate(order)]


def _join_row(row: Sequence[Action], joined: set[int]) -> list[Action]:
    apart: defaultdict[int, deque[int]] = defaultdict(deque)
    found: list[Action] = []
    for slot, action in enumerate(row):
        stage, kind, micro_batch = action
        if slot in joined:
            found.append(Action(stage, ActionKind.BACKWARD, micro_batch))
        elif kind == "W":
            if slot - 1 not in joined:
                found.append(Action(stage, kind, apart[stage].popleft()))
        else:
            if kind == "I":
                apart[stage].append(micro_batch)
            found.append(action)
    return found
