"""Layers inside of transforms of torch.func, or with other parameters than their own: equal to one device, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from tests.parity.jobs import transform_jobs as jobs

import meshwright as mw
from meshwright import testing

ZERO_3, PIPELINE = "dp=2,zero=3,whole_below=0", "pp=2,micro_batches=2"


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (jobs.Tangents, ZERO_3),
        (jobs.Duals, ZERO_3),
        (jobs.Mapped, ZERO_3),
        (jobs.Slopes, "dp=2,zero=2"),
        (jobs.Generated, "tp=2"),
        (jobs.Generated, "dp=2,tp=2"),
        (jobs.Shifted, "tp=2"),
        (jobs.Generated, ZERO_3),
        (jobs.Scripted, PIPELINE),
        (jobs.Scripted, "tp=2,pp=2,micro_batches=2"),
    ],
)
def test_equal_to_one_device(build: Any, line: str) -> None:
    ranks = mw.Plan.parse(line).num_ranks
    assert testing.run_ranks(jobs.losses, ranks, build, line)[0] == pytest.approx(
        jobs.losses(build, "single"), rel=1e-11
    )


@pytest.mark.parametrize(
    ("build", "line", "word"),
    [
        (jobs.Slopes, ZERO_3, "torch.func (grad, vjp, jacrev, jvp), which does not go beside ZeRO-3"),
        (jobs.Tangents, PIPELINE, "layer 'net.0' runs inside of a transform of torch.func"),
        (jobs.Duals, PIPELINE, "layer 'net.0' runs inside of a transform of torch.func"),
        (jobs.Mapped, PIPELINE, "layer 'net.0' runs inside of a transform of torch.func"),
        (jobs.Duals, "tp=2", "or torch.autograd.forward_ad runs code that ranks have cut"),
    ],
)
def test_refused_by_name_on_every_rank(build: Any, line: str, word: str) -> None:
    for outcome in testing.run_outcomes(jobs.losses, 2, build, line):
        assert isinstance(outcome.error, mw.ApplyError)
        assert word in str(outcome.error)
        assert outcome.error.fix
