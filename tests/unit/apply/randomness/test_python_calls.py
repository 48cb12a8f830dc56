"""Calls of Python's and NumPy's generators by their place in the code and their sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.apply.randomness.names import LOSS, Names
from meshwright.apply.randomness.python_calls import (
    PythonCalls,
    Turns,
    are_in_turn,
    has_loop,
    lengths_in,
    turns_for_all,
    turns_of_all,
    turns_to_rows,
    varies_with_samples,
    ways_in_turn,
)

ONCE, LOOP, OTHER = ("", 1), ("", 2), ("layer", 3)
HERE = (LOSS, Names(nn.Linear(1, 1)).site())
"""Code outside of all modules."""


def test_a_loop_over_samples_is_one_of_as_many_calls_for_each() -> None:
    runs = [[(6, {ONCE: 1, LOOP: 6}), (2, {ONCE: 1, LOOP: 2}), (4, {ONCE: 1, LOOP: 4})]]
    assert ways_in_turn(runs) == [{ONCE: Turns(0, count=1), LOOP: Turns(1)}]
    assert has_loop(runs)
    assert varies_with_samples(runs)


def test_several_calls_for_each_sample_have_two_orders() -> None:
    assert ways_in_turn([[(3, {LOOP: 6}), (1, {LOOP: 2})]]) == [{LOOP: Turns(2)}, {LOOP: Turns(2, is_minor=True)}]


def test_no_loop_is_found_where_counts_do_not_fit_or_none_grows() -> None:
    assert ways_in_turn([[(4, {ONCE: 1}), (2, {ONCE: 1})]]) == []
    assert ways_in_turn([[(4, {ONCE: 1, LOOP: 5}), (2, {ONCE: 1, LOOP: 2})]]) == []
    assert ways_in_turn([[(4, {LOOP: 4}), (2, {LOOP: 2, OTHER: 1})]]) == []


def test_counts_have_to_fit_with_each_set_of_numbers() -> None:
    fits, apart = [(3, {LOOP: 3}), (1, {LOOP: 1})], [(3, {LOOP: 2}), (1, {LOOP: 1})]
    assert ways_in_turn([fits, fits]) == [{LOOP: Turns(1)}]
    assert ways_in_turn([fits, apart]) == []
    assert ways_in_turn([fits, fits, [(3, {}), (1, {})]]) == []  # three samples may have decided alike by chance
    many, none = [(9, {LOOP: 9}), (3, {LOOP: 3})], [(9, {}), (3, {})]
    assert ways_in_turn([many, many, none]) == [{LOOP: Turns(1)}]  # numbers of all samples left it out
    assert turns_for_all([[(3, {ONCE: 2}), (1, {ONCE: 2})], [(3, {ONCE: 3}), (1, {ONCE: 3})]]) == {ONCE: Turns(0)}


def test_a_run_is_in_turn_where_all_its_calls_are() -> None:
    turns = {ONCE: Turns(0), LOOP: Turns(2)}
    assert are_in_turn(turns, [(3, {ONCE: 1, LOOP: 6}), (1, {ONCE: 1, LOOP: 2})])
    assert are_in_turn(turns, [(3, {LOOP: 6}), (1, {LOOP: 2})])
    assert not are_in_turn(turns, [(3, {LOOP: 6}), (1, {LOOP: 1})])
    assert not are_in_turn(turns, [(3, {ONCE: 1}), (1, {ONCE: 2})])
    assert not are_in_turn(turns, [(3, {OTHER: 1}), (1, {OTHER: 1})])


@pytest.mark.parametrize("turns", [Turns(2), Turns(2, is_minor=True)])
def test_a_sample_s_numbers_do_not_depend_on_where_the_batch_is_cut(turns: Turns) -> None:
    names, told = Names(nn.Linear(1, 1)), list[str]()

    def keys(first: int, num: int) -> set[int]:
        calls = PythonCalls("", names, first, num, turns={HERE: turns}, on_unknown=told.append)
        found = {key for _ in range(2 * num) if (key := calls.next_key()) is not None}
        calls.check()
        return found

    whole, parts = keys(0, 5), [keys(0, 2), keys(2, 3)]
    assert len(whole) == 10
    assert parts[0] | parts[1] == whole
    assert not told


def test_more_calls_than_in_the_first_batch_are_told_and_the_rank_s_own() -> None:
    names, told = Names(nn.Linear(1, 1)), list[str]()

    def last(first: int) -> int | None:
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
    lengths = [turns_to_rows({ONCE: Turns(0, count=count)}) for count in (3, 5)]
    assert turns_of_all(lengths) == ({ONCE: Turns(0)}, True)


def test_calls_that_are_counted_alone_have_no_seeds_and_others_than_before_are_told() -> None:
    told = list[str]()

    def count(turns: dict[tuple[str, int], Turns], *, has_lengths: bool = True) -> None:
        options = {"is_seeded": False, "has_lengths": has_lengths, "on_unknown": told.append}
        calls = PythonCalls("", Names(nn.Linear(1, 1)), 0, 2, turns=turns, **options)
        assert [calls.next_key() for _ in range(2)] == [None, None]
        calls.check()

    count({HERE: Turns(0)})
    count({HERE: Turns(0, count=2)})
    assert not told
    count({HERE: Turns(0, count=1)}, has_lengths=False)  # the steps of a longer sequence
    assert not told
    count({HERE: Turns(0, count=1)})
    count({})
    assert ["has not drawn 1 times" in text or "did not with the first batch" in text for text in told] == [True] * 3


def test_lengths_are_those_of_dims_that_are_not_the_samples() -> None:
    batch = {"x": torch.ones(4, 5, 2), "y": torch.ones(4)}
    assert lengths_in(batch, 4) == [[], [5, 2]]
    assert lengths_in({"y": torch.ones(3), "x": torch.ones(3, 5, 2)}, 3) == lengths_in(batch, 4)
    assert lengths_in({"x": torch.ones(4, 6, 2), "y": torch.ones(4)}, 4) != lengths_in(batch, 4)
