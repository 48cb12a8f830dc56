"""Cuts into stages: the fast ways give what the plain ones give, to the bound."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.costs.stages import _cut, balanced_cut
from meshwright.plan.costs.stages_on_ranks import StagesOnRanks
from meshwright.schedule.balance import balance_layers, balance_over_ranks


def halved(prefix: list[float], num_stages: int) -> tuple[int, ...]:
    """Cut as `balanced_cut` does, with a cut for each half."""
    low, high = prefix[-1] / num_stages, prefix[-1]
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut(prefix, middle, num_stages) is None else (low, middle)
    best = _cut(prefix, high * 1.01, num_stages) or _cut(prefix, high, num_stages)
    return best or (*range(num_stages), len(prefix) - 1)


@given(
    st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.3, 1.0, 1.0, 1.0, 7.5]) | st.floats(0, 100), min_size=2, max_size=40),
    st.data(),
)
def test_stages_are_those_of_all_halves(costs: list[float], data: st.DataObject) -> None:
    prefix = [0.0, *itertools.accumulate(costs)]
    num_stages = data.draw(st.integers(2, len(costs)))
    assert balanced_cut(prefix, num_stages) == halved(prefix, num_stages)


@given(st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.3, 1.0, 1.0, 7.5]), min_size=1, max_size=20), st.data())
def test_layers_lie_where_a_look_at_every_start_puts_them(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    every = balance_layers(costs, num_stages, [None] * len(costs))  # with wishes each start is looked at
    assert balance_layers(costs, num_stages) == every


def moved_one_by_one(costs: list[float], ranks: list[int]) -> list[int]:
    """Cut as `balance_over_ranks` does, with a look at every move of one or two cuts."""
    found = balance_layers(costs, len(ranks))
    cuts = [found.index(stage) for stage in range(1, len(ranks))]

    def judged(cuts: list[int]) -> tuple[float, float]:
        ends = [0, *cuts, len(costs)]
        if any(end <= start for start, end in itertools.pairwise(ends)):
            return float("inf"), float("inf")
        works = [sum(costs[start:end]) for start, end in itertools.pairwise(ends)]
        loads = [0.0] * (max(ranks) + 1)
        for rank, work in zip(ranks, works, strict=True):
            loads[rank] += work
        return max(loads), max(works)

    best, moves = judged(cuts), [(place, by) for place in range(len(cuts)) for by in (-1, 1)]
    while True:
        near: list[list[int]] = []
        for some in itertools.product(moves, [*moves, (0, 0)]):
            near.append(list(cuts))
            for place, by in some:
                near[-1][place] += by
        score, cuts_there = min((judged(one), one) for one in near)
        if score >= best:
            ends = [0, *cuts, len(costs)]
            return [stage for stage, (a, b) in enumerate(itertools.pairwise(ends)) for _ in range(b - a)]
        best, cuts = score, cuts_there


@given(
    st.lists(st.sampled_from([0.1, 1.0, 1.0, 1.0, 3.0]) | st.floats(0, 10), min_size=8, max_size=20),
    st.sampled_from([[0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 2, 2, 1, 0], [0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 3, 2, 1, 0]]),
)
def test_stages_over_ranks_are_those_of_every_move(costs: list[float], ranks: list[int]) -> None:
    assert balance_over_ranks(costs, ranks) == moved_one_by_one(costs, ranks)


@given(st.lists(st.floats(0, 10), min_size=8, max_size=12), st.sampled_from(["1f1b", "zbv", "interleaved"]))
def test_one_ranks_sum_is_the_one_among_all(costs: list[float], schedule: str) -> None:
    sums = [0.0, *itertools.accumulate(costs)]
    for bounds in ((0, 3, 5, len(costs)), (0, 1, 2, 4, 5, 7, len(costs))):
        placed = StagesOnRanks(bounds, 3, schedule, kinds=range(len(costs)))
        assert placed.on_ranks(sums) == [placed.on_rank(rank, sums) for rank in range(3)]
