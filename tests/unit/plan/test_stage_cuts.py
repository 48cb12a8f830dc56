"""Cuts into stages: the fast ways give what the plain ones give, to the bound."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.costs.stages import _cut, balanced_cut
from meshwright.schedule.balance import balance_layers


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
