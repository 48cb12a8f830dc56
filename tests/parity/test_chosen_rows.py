"""Dropout on rows that values choose (tokens of experts, edges, sequences without padding): one process's losses."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs.chosen_rows_jobs import Trained, check, train
from tests.parity.models.chosen_rows_models import MODELS

from meshwright import testing


@functools.cache
def single(name: str) -> Trained:
    return train(name, "single")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("line", ["micro_batches=3", "micro_batches=2,recompute=full"])
def test_one_process(name: str, line: str) -> None:
    """Batches of other sizes, with other tokens for each expert, follow the first one."""
    check(train(name, line), single(name))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("loop", "dp=2,zero=3,whole_below=0"),
        ("loop", "tp=2"),
        ("inline", "tp=2,recompute=full"),
        ("mask", "pp=2,micro_batches=2"),
        ("edges", "dp=2,micro_batches=2"),
        ("unpadded alone", "dp=2"),
        ("unpadded trim", "tp=2"),
        ("unpadded pack", "dp=2,zero=3,whole_below=0"),
        ("unpadded pack sorted", "tp=2,recompute=full"),
        ("flattened", "dp=2"),
        ("unpadded images", "tp=2"),
        ("by sign", "dp=2"),
        ("many", "tp=2"),  # experts that no trial has called
        ("unpadded pack", "pp=2,micro_batches=2"),  # sorted and packed where another stage's rows are
    ],
)
def test_two_ranks(name: str, line: str) -> None:
    for found in testing.run_ranks(train, 2, name, line):
        check(found, single(name))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("by sign", "dp=2,tp=2"),
        ("loop", "dp=2,tp=2"),
        ("unpadded images", "tp=2,pp=2,micro_batches=2"),
        ("edges", "tp=2,pp=2,micro_batches=2"),
    ],
)
def test_four_ranks(name: str, line: str) -> None:
    """An expert that some ranks' first shares have no tokens for was drawn for as if its layers were whole."""
    for found in testing.run_ranks(train, 4, name, line):
        check(found, single(name))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("unpadded ")])
def test_one_sample_at_a_time(name: str) -> None:
    """Any number of rows is one sample's: without padding in the first batch, places of rows were taken to be plain ones."""
    options = {"count": 2, "every": 0, "grows": False}
    check(train(name, "micro_batches=2", **options), train(name, "single", **options))


def test_one_sample_of_each_rank() -> None:
    """As above, with a rank for each sample."""
    wanted = train("unpadded alone", "single", count=2, every=0, grows=False)
    for found in testing.run_ranks(
        functools.partial(train, count=2, every=0, grows=False), 2, "unpadded alone", "dp=2"
    ):
        check(found, wanted)


def test_rows_without_an_index_are_told() -> None:
    """Slices of samples that are put together: without padding in the first batch, their number is all that shows."""
    reasons = train("unpadded join", "micro_batches=2", count=2, grows=False)[2]
    assert any("another number of rows for each sample" in reason for reason in reasons)
    assert not train("unpadded join", "micro_batches=2", steps=1)[2]


def test_rows_of_equal_number_are_told() -> None:
    """Rows of three layers, all chosen first: three choices of as many rows may be meant, and each rank draws for itself."""
    assert any("no known sample dim" in reason for reason in train("parts", "micro_batches=2")[2])
    assert not train("parts", "micro_batches=2", steps=1)[2]


def test_samples_that_are_sorted_for_packed_layers_are_told() -> None:
    """Rows of samples stood for rows of steps, which numbers were written for behind the end of their memory."""
    assert any("may depend on the layout" in reason for reason in train("padded lstm", "micro_batches=2")[2])


@pytest.mark.parametrize("name", ["unpadded if any", "unpadded sorted", "unpadded lstm"])
def test_rows_that_the_first_batch_did_not_choose_are_told(name: str) -> None:
    """The first batch has no padding: a model takes another way with some, or sorts tokens that were in order."""
    reasons = train(name, "micro_batches=2", steps=2)[2]
    assert any("rows that an index has chosen" in reason or "no known sample dim" in reason for reason in reasons)
    assert not train(name, "micro_batches=2", steps=1)[2]
