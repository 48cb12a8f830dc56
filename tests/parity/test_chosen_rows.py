"""Dropout on rows that values choose (tokens of experts, edges, sequences without padding): one process's losses."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs.chosen_rows_jobs import train
from tests.parity.models.chosen_rows_models import MODELS
from tests.tolerances import FLOAT64

from meshwright import testing

Trained = tuple[list[float], list[float], list[str]]


@functools.cache
def single(name: str) -> Trained:
    return train(name, "single")


def check(found: Trained, wanted: Trained) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=FLOAT64)
    assert found[1] == pytest.approx(wanted[1], rel=FLOAT64)
    assert not found[2]


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
    ],
)
def test_two_ranks(name: str, line: str) -> None:
    for found in testing.run_ranks(train, 2, name, line):
        check(found, single(name))
