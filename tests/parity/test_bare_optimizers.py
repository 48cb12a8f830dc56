"""Optimizers whose class does not call torch's constructor train as in plain torch, and leave their class as it was."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.parity.jobs import bare_optimizer_jobs as jobs

from meshwright import testing


@pytest.mark.parametrize("in_own_loop", [False, True])
@pytest.mark.parametrize(
    ("make", "line"),
    [
        (jobs.bare, "dp=2"),
        (jobs.bare, "dp=2,zero=1"),
        (jobs.bare, "dp=2,zero=3,whole_below=0"),
        (jobs.bare, "tp=2"),
        (jobs.ahead, "dp=2"),
        (jobs.ahead, "tp=2"),
    ],
)
def test_equal_to_plain_torch(make: Any, line: str, in_own_loop: bool) -> None:
    found = testing.run_ranks(functools.partial(jobs.train, in_own_loop=in_own_loop), 2, make, line)[0]
    assert found == pytest.approx(jobs.alone(make), rel=1e-11)


@pytest.mark.parametrize("make", [jobs.bare, jobs.ahead])
def test_the_class_is_left_as_it_was(make: Any) -> None:
    assert jobs.train(make, "single") == pytest.approx(jobs.alone(make), rel=1e-11)
    assert jobs.train(make, "single", in_own_loop=True) == pytest.approx(jobs.alone(make), rel=1e-11)
