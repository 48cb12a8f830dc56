"""Dropout and noise for rows of which no dim holds the samples in their order: one process's losses."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs.chosen_rows_jobs import Trained, check, train
from tests.parity.models.sample_blocks_models import BLOCKS, UNKNOWN

from meshwright import testing


@functools.cache
def single(name: str) -> Trained:
    return train(name, "single")


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("line", ["micro_batches=3", "micro_batches=2,recompute=full"])
def test_one_process(name: str, line: str) -> None:
    """Batches of other sizes follow the first one."""
    check(train(name, line), single(name))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("queries", "dp=2"),
        ("queries", "tp=2"),  # which cuts the rows' features, and slices the rows
        ("sequences", "dp=2,zero=3,whole_below=0"),
        ("sequences", "pp=2,micro_batches=2"),
        ("sequences", "tp=2,micro_batches=2"),
        ("first rows", "dp=2,micro_batches=2"),
        ("first rows", "tp=2"),
        ("first rows", "dp=2,zero=2"),
        ("noise", "dp=2"),
        ("hidden documents", "dp=2"),
        ("hidden documents", "pp=2,micro_batches=2"),
        ("hidden encoder", "dp=2,zero=3,whole_below=0"),
        ("hidden documents", "dp=2,zero=3,whole_below=0"),
    ],
)
def test_two_ranks(name: str, line: str) -> None:
    for found in testing.run_ranks(train, 2, name, line):
        check(found, single(name))


@pytest.mark.parametrize("name", ["sequences", "first rows"])
def test_four_ranks(name: str) -> None:
    for found in testing.run_ranks(train, 4, name, "dp=2,tp=2"):
        check(found, single(name))


@pytest.mark.parametrize("name", UNKNOWN)
def test_rows_of_no_known_sample_are_told(name: str) -> None:
    """Rows that several samples see, as many rows of each sample as in no trial, and rows that the first batch's masks hide."""
    reasons = train(name, "micro_batches=2", steps=2)[2]
    told = ("with the same random numbers", "no known sample dim", "does not show in what order")
    assert any(text in reason for reason in reasons for text in told)
