"""Calls of Python's and NumPy's generators by their place in the code and their sample."""

from __future__ import annotations

import pytest
from torch import nn

from meshwright.apply.randomness.names import LOSS, Names
from meshwright.apply.randomness.python_calls import (
    PythonCalls,
    Turns,
    turns_of_all,
    turns_to_rows,
    ways_in_turn,
)

ONCE, LOOP, OTHER = ("", 1), ("", 2), ("layer", 3)
HERE = (LOSS, Names(nn.Linear(1, 1)).site())
"""Code outside of all modules."""


def test_a_loop_over_samples_is_one_of_as_many_calls_for_each() -> None:
    runs = [(6, {ONCE: 1, LOOP: 6}), (2, {ONCE: 1, LOOP: 2}), (4, {ONCE: 1, LOOP: 4})]
    assert ways_in_turn(runs) == [{ONCE: Turns(0), LOOP: Turns(1)}]


def test_several_calls_for_each_sample_have_two_orders() -> None:
    runs = [(3, {LOOP: 6}), (1, {LOOP: 2})]
    assert ways_in_turn(runs) == [{LOOP: Turns(2)}, {LOOP: Turns(2, is_minor=True)}]


def test_no_loop_is_found_where_counts_do_not_fit_or_none_grows() -> None:
    assert ways_in_turn([(4, {ONCE: 1}), (2, {ONCE: 1})]) == []
    assert ways_in_turn([(4, {ONCE: 1, LOOP: 5}), (2, {ONCE: 1, LOOP: 2})]) == []
    assert ways_in_turn([(4, {LOOP: 4}), (2, {LOOP: 2, OTHER: 1})]) == []


@pytest.mark.parametrize("turns", [Turns(2), Turns(2, is_minor=True)])
def test_a_sample_s_numbers_do_not_depend_on_where_the_batch_is_cut(turns: Turns) -> None:
    names, told = Names(nn.Linear(1, 1)), list[str]()

    def keys(first: int, num: int) -> set[int]:
        calls = PythonCalls("", names, first, num, turns={HERE: turns}, on_unknown=told.append)
        found = {calls.next_key() for _ in range(2 * num)}
        calls.check()
        return found

    whole, parts = keys(0, 5), [keys(0, 2), keys(2, 3)]
    assert len(whole) == 10
    assert parts[0] | parts[1] == whole
    assert not told


def test_more_calls_than_in_the_first_batch_are_told_and_the_rank_s_own() -> None:
    names, told = Names(nn.Linear(1, 1)), list[str]()

    def last(first: int) -> int:
        calls = PythonCalls("", names, first, 2, turns={HERE: Turns(1)}, on_unknown=told.append)
        return [calls.next_key() for _ in range(3)][-1]

    assert last(0) != last(2)
    assert all("or more often" in text for text in told)
    assert len(told) == 2


def test_ranks_agree_where_none_contradicts() -> None:
    one, other = {ONCE: Turns(0), LOOP: Turns(2, is_minor=True)}, {LOOP: Turns(2, is_minor=True)}
    assert turns_of_all([turns_to_rows(one), None, turns_to_rows(other)]) == (one, True)
    assert turns_of_all([turns_to_rows(one), turns_to_rows({LOOP: Turns(2)})]) == (None, False)
    assert turns_of_all([None, None]) == (None, True)
