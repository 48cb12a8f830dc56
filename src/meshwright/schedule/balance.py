"""Balanced cut of a chain of layers into consecutive stages of equal work."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from meshwright.errors import ApplyError

__all__: list[str] = []

_FLOPS_PER_PARAMETER = 48
"""What a parameter costs in a step beside its products, as floating-point operations: gradient and optimizer move about 24
bytes of each (Rajbhandari et al. 2020, section 3.1: 16 bytes of state), and a core computes about two operations in the
time in which it moves a byte [FLOPs]."""
_PASSES = 3
"""A step's operations for each of forward's: backward takes twice as many (Narayanan et al. 2021, appendix)."""


def work_of(forward_flops: float, num_params: float) -> float:
    """Return what a layer costs in a step, for the cut of a model into stages [FLOPs].

    Args:
        forward_flops: Of its forward on a micro-batch [FLOPs].
        num_params: Its parameters, those of earlier layers left out [count].
    """
    return float(_PASSES * forward_flops + _FLOPS_PER_PARAMETER * num_params + 1)


def balance_layers(costs: Sequence[float], num_stages: int, wishes: Sequence[int | None] | None = None) -> list[int]:
    """Return the stage of each layer, such that the most expensive stage is as cheap as possible.

    Exact, by dynamic programming over the cut positions: O(layers x stages), with wishes O(layers^2 x stages). Among equal
    cuts the earliest is taken.

    Args:
        costs: Cost of each layer, in order, not negative [any one unit].
        num_stages: Stages; each gets at least one layer [count].
        wishes: For each layer the stage that it must lie on, or None.

    Returns:
        Stage index of each layer, not decreasing.

    Raises:
        ApplyError: There are fewer layers than stages, or the wishes leave a stage without a layer or run backwards.

    >>> balance_layers([1, 1, 1, 3], 2)
    [0, 0, 0, 1]
    >>> balance_layers([1, 1, 1, 3], 2, [None, 1, None, None])
    [0, 1, 1, 1]
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        raise ApplyError(
            f"{num_layers} layers cannot be spread over {num_stages} devices: each needs at least one layer",
            fix=f"use at most {max(num_layers, 1)} devices",
        )
    prefix = list(itertools.accumulate(costs, initial=0.0))
    # best[s][n]: the cheapest worst stage when the first n layers lie on s stages; cut[s][n]: where the last one starts.
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        if wishes is None:
            _add_stage(prefix, best[stage - 1], best[stage], cut[stage], stage)
            continue
        for end in range(stage, num_layers + 1):
            for start in range(end - 1, stage - 2, -1):
                last = prefix[end] - prefix[start]
                if last > best[stage][end] or wishes[start] not in (None, stage - 1):
                    break
                worst = max(best[stage - 1][start], last)
                if worst <= best[stage][end] and worst < float("inf"):
                    best[stage][end], cut[stage][end] = worst, start
    if best[num_stages][num_layers] == float("inf"):
        raise ApplyError(
            f"the plan's stages= do not fit the model (rule: in the order in which the layers run stages do not decrease, and "
            f"each of the {num_stages} stages has a layer)",
            fix="leave out stages=",
        )
    stages = [0] * num_layers
    end = num_layers
    for stage in range(num_stages, 0, -1):
        start = cut[stage][end]
        stages[start:end] = [stage - 1] * (end - start)
        end = start
    return stages


def _add_stage(prefix: Sequence[float], before: Sequence[float], best: list[float], cut: list[int], stage: int) -> None:
    """Fill in what the worst of so many stages costs, and where the last one starts, for each number of layers.

    With a later start the last stage costs less and those before it more, so that the best start is where the two meet; with
    more layers they meet later. So all layers are passed once.

    Args:
        prefix: Sums of the layers' costs.
        before: The cheapest worst of one stage less, by layers.
        best: Is filled in: the cheapest worst, by layers.
        cut: Is filled in: where the last stage starts, by layers.
        stage: Stages [count].
    """
    meets = stage - 1  # the first start at which those before cost as much as the last one
    for end in range(stage, len(prefix)):
        while meets < end - 1 and before[meets] < prefix[end] - prefix[meets]:
            meets += 1
        start, worst = meets, max(before[meets], prefix[end] - prefix[meets])
        if meets >= stage and prefix[end] - prefix[meets - 1] <= worst:
            start, worst = meets - 1, prefix[end] - prefix[meets - 1]
        # Among equal cuts the earliest.
        while start >= stage and max(before[start - 1], prefix[end] - prefix[start - 1]) == worst:
            start -= 1
        best[end], cut[end] = worst, start


def balance_over_ranks(
    costs: Sequence[float], rank_of_stage: Sequence[int], wishes: Sequence[int | None] | None = None
) -> list[int]:
    """Return the stage of each layer where a rank may have several stages, with little work for the busiest rank.

    Among equal cuts it prefers the one whose most expensive stage is cheapest. It starts from `balance_layers` and moves one or
    two cuts at a time by a layer while that helps. The result may not be the optimum.

    Args:
        costs: Cost of each layer, in order, not negative [any one unit].
        rank_of_stage: The rank of each stage.
        wishes: For each layer the stage that it must lie on, or None.

    Returns:
        Stage index of each layer, not decreasing.

    Raises:
        ApplyError: As `balance_layers`.

    >>> balance_over_ranks([1, 1, 1, 1, 1, 1], [0, 1, 1, 0])
    [0, 1, 2, 2, 3, 3]
    """
    num_stages = len(rank_of_stage)
    found = balance_layers(costs, num_stages, wishes)
    if len(set(rank_of_stage)) == num_stages:
        return found
    cuts = [found.index(stage) for stage in range(1, num_stages)]

    @functools.cache  # near cuts have most of their stages in common
    def cost_of(start: int, end: int) -> float:
        return sum(costs[start:end])

    best = _judge(cuts, cost_of, len(costs), rank_of_stage, wishes)
    while True:
        nearest = [
            (_judge(near, cost_of, len(costs), rank_of_stage, wishes), near)
            for near in _near(cuts, _binding_stages(cuts, cost_of, len(costs), rank_of_stage), rank_of_stage)
        ]
        score, near = min(nearest, default=(best, cuts))
        if score >= best:
            break
        best, cuts = score, near
    ends = [0, *cuts, len(costs)]
    return [stage for stage, (start, end) in enumerate(itertools.pairwise(ends)) for _ in range(end - start)]


def _judge(
    cuts: Sequence[int],
    cost_of: Callable[[int, int], float],
    num_layers: int,
    rank_of_stage: Sequence[int],
    wishes: Sequence[int | None] | None,
) -> tuple[float, float]:
    """Return the load of the busiest rank and the cost of the worst stage; both infinite for cuts that are not allowed."""
    ends = [0, *cuts, num_layers]
    loads = [0.0] * (max(rank_of_stage) + 1)
    worst = 0.0
    for stage, (start, end) in enumerate(itertools.pairwise(ends)):
        if end <= start or (wishes is not None and any(wish not in (None, stage) for wish in wishes[start:end])):
            return float("inf"), float("inf")
        cost = cost_of(start, end)
        loads[rank_of_stage[stage]] += cost
        worst = max(worst, cost)
    return max(loads), worst


def _binding_stages(
    cuts: Sequence[int], cost_of: Callable[[int, int], float], num_layers: int, rank_of_stage: Sequence[int]
) -> tuple[set[int], set[int]]:
    """Return the busiest ranks and the most expensive stages: cuts that leave one of both as they are make nothing better."""
    costs = [cost_of(start, end) for start, end in itertools.pairwise([0, *cuts, num_layers])]
    loads = [0.0] * (max(rank_of_stage) + 1)
    for rank, cost in zip(rank_of_stage, costs, strict=True):
        loads[rank] += cost
    most, worst = max(loads), max(costs)
    return {rank for rank, load in enumerate(loads) if load == most}, {
        i for i, cost in enumerate(costs) if cost == worst
    }


def _near(cuts: Sequence[int], binding: tuple[set[int], set[int]], rank_of_stage: Sequence[int]) -> Iterator[list[int]]:
    """Yield the same cuts with one or two of them moved by a layer, where that may be better."""
    busiest, worst = binding
    moves = [(place, by) for place in range(len(cuts)) for by in (-1, 1)]
    for some in (*((move,) for move in moves), *itertools.combinations_with_replacement(moves, 2)):
        touched = {stage for place, _ in some for stage in (place, place + 1)}
        if busiest <= {rank_of_stage[stage] for stage in touched} or worst <= touched:
            near = list(cuts)
            for place, by in some:
                near[place] += by
            yield near
