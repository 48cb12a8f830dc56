"""Draws in tensors whose length depends on which samples lie together: one process's losses, whatever the first batch shows."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs import trimmed_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing


@functools.cache
def single(kind: str, is_first_padded: bool) -> list[float]:
    return jobs.train(kind, "single", is_first_padded=is_first_padded)[0]


@pytest.mark.parametrize("is_first_padded", [False, True])
@pytest.mark.parametrize("kind", jobs.KINDS)
@pytest.mark.parametrize("line", ["dp=1,micro_batches=2", "dp=2,zero=3,whole_below=0,micro_batches=2"])
def test_padding_changes_no_number(line: str, kind: str, is_first_padded: bool) -> None:
    job = functools.partial(jobs.train, kind, line, is_first_padded=is_first_padded)
    for losses, told in testing.run_ranks(job, mw.Plan.parse(line).num_ranks):
        assert losses == pytest.approx(single(kind, is_first_padded), rel=FLOAT64)
        assert not told


def test_a_cut_of_the_heads_draws_the_same() -> None:
    for losses, _ in testing.run_ranks(functools.partial(jobs.train, "attention", "tp=2", is_first_padded=False), 2):
        assert losses == pytest.approx(single("attention", False), rel=FLOAT64)
