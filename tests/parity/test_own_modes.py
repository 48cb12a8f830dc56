"""Modes that a model's own `train` sets, and what a forward begins to do later, under plans that cut the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity.jobs import mode_jobs as jobs

import meshwright as mw
from meshwright import testing

TOLERANCE = 1e-10


def _equal(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=1", "tp=2", "pp=2", "pp=2,micro_batches=1"]
)
def test_an_adapter_is_merged_for_an_evaluation_and_taken_out_after_it(plan: str) -> None:
    """The mode came back by its flag alone: the adapter stayed merged, and was trained no more."""
    expected = jobs.plain(jobs.build_adapted)
    for found in testing.run_ranks(jobs.planned, 2, jobs.build_adapted, plan):
        _equal(found, expected)


def test_an_adapter_is_merged_on_one_device() -> None:
    _equal(jobs.planned(jobs.build_adapted, "single"), jobs.plain(jobs.build_adapted))


def test_a_target_network_that_begins_to_move_across_stages_is_refused() -> None:
    """The stage that holds the layer took the write for one of another stage, and did nothing."""
    for outcome in testing.run_outcomes(jobs.planned, 2, jobs.build_averaging, "pp=2"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "needs a parameter that another stage holds" in str(outcome.error)


def test_mixing_that_begins_with_a_new_length_is_refused_where_layers_are_cut() -> None:
    """A proof at the new length writes buffers and puts them back, which the trial took for the forward's own writes."""
    for outcome in testing.run_outcomes(jobs.train_mixing, 4, "dp=2,tp=2"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "mixes the samples" in str(outcome.error)
