"""Draws of one module at several places in its code, or on several stages: one process's losses."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs.draw_place_jobs import train
from tests.tolerances import FLOAT64

from meshwright import testing

Trained = tuple[list[float], list[float], list[str]]


@functools.cache
def single(name: str) -> Trained:
    return train(name, "single")


def is_equal(found: Trained, wanted: Trained) -> bool:
    return all(found[place] == pytest.approx(wanted[place], rel=FLOAT64) for place in (0, 1))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("branch", "tp=2"),  # later batches leave out the first draw, so that the next ones have other numbers
        ("unpadded function", "pp=2,micro_batches=2"),  # the other stage has drawn for the same rows
        ("unpadded module", "pp=2"),
        ("unpadded layer", "pp=2,micro_batches=2"),
    ],
)
def test_one_process(name: str, line: str) -> None:
    for found in testing.run_ranks(train, 2, name, line):
        assert is_equal(found, single(name))
        assert not found[2]


def test_a_branch_that_no_trial_has_shown_is_told_and_drawn_alike_by_ranks_of_a_layer() -> None:
    """Its draw has the number, and the shape, of one inside of a cut layer in the first batch."""
    for found in testing.run_ranks(train, 2, "branch later", "tp=2"):
        assert is_equal(found, single("branch later"))
        assert any("was not made by the first batch" in reason for reason in found[2])


def test_a_layer_that_no_trial_has_run_draws_as_a_whole_one_beside_cut_siblings() -> None:
    for found in testing.run_ranks(train, 2, "left out later", "tp=2"):
        assert is_equal(found, single("left out later"))
        assert any("was not made by the first batch" in reason for reason in found[2])


def test_a_loop_that_leaves_out_a_layer_before_a_cut_one_is_told() -> None:
    """One place in the code draws inside of the cut and outside, so that only the number of the draw tells which it is."""
    for found in testing.run_ranks(train, 2, "looped", "tp=2"):
        assert any("Give each of these layers a dropout of its own" in reason for reason in found[2])


def test_rows_that_were_all_chosen_before_are_not_taken_for_the_last_ones() -> None:
    """In the first batch one expert gets all tokens, whose rows are the last ones that were chosen."""
    for found in testing.run_ranks(train, 2, "chosen first", "dp=2"):
        assert any("has no known sample dim" in reason for reason in found[2])


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        (
            "one dropout",
            "pp=2",
            "which other stages go by",
        ),  # a branch of a layer on another stage draws more or less often
        (
            "one dropout of experts",
            "dp=2",
            "another layer runs now",
        ),  # experts without tokens move on the number of a draw
    ],
)
def test_one_dropout_of_layers_that_draw_as_often_as_values_say_is_told(name: str, line: str, told: str) -> None:
    assert any(told in reason for found in testing.run_ranks(train, 2, name, line) for reason in found[2])
