"""Samples packed between layers: one process's losses, where recurrence and packing are on different stages, too."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs import packed_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing


@functools.cache
def single(kind: str) -> list[tuple[float, float]]:
    return jobs.train(kind, "single")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        *((kind, "pp=2,micro_batches=2") for kind in jobs.KINDS),
        ("steps", "pp=2,micro_batches=3,schedule=zb-h1"),
        ("steps", "pp=2,virtual=2,micro_batches=2,schedule=interleaved"),
        ("states", "pp=3,micro_batches=2,recompute=full"),
        ("steps", "tp=2,pp=2,micro_batches=2"),
        ("list", "dp=2,zero=3,whole_below=0"),
    ],
)
def test_one_process(kind: str, line: str) -> None:
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, kind, line):
        for (loss, norm), (own_loss, own_norm) in zip(found, single(kind), strict=True):
            assert loss == pytest.approx(own_loss, rel=FLOAT64)
            assert norm == pytest.approx(own_norm, rel=FLOAT64)
