"""Weights that torch.nn.utils.parametrize.cached keeps while a forward runs: trials and shards have their own."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs import cached_weights_jobs as jobs

import meshwright as mw
from meshwright import testing


@pytest.mark.parametrize("line", ["tp=2", "dp=2", "dp=2,zero=3,whole_below=1"])
def test_weights_that_a_forward_caches_are_one_devices(line: str) -> None:
    for losses in testing.run_ranks(jobs.planned, 2, line):
        assert losses == pytest.approx(jobs.plain(), rel=1e-11)


def test_a_cached_shard_is_not_taken_for_the_weight_outside_of_its_layer() -> None:
    for outcome in testing.run_outcomes(functools.partial(jobs.planned, has_penalty=True), 2, "tp=2"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "needs the whole tensor" in str(outcome.error)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2", "pp=2", "dp=2,tp=2"])
def test_recurrences_that_drop_weights_are_one_devices(line: str) -> None:
    # A trial in eval mode registers the raw parameter under the other name, which training may not set any more.
    expected, state = jobs.dropping("single")
    for losses, values in testing.run_ranks(jobs.dropping, mw.Plan.parse(line).num_ranks, line):
        assert losses == pytest.approx(expected, rel=1e-11)
        testing.assert_parity(values, state, 1e-11)


@pytest.mark.parametrize("line", ["dp=2", "tp=2", "pp=2", "tp=2,pp=2"])
def test_weights_that_a_forward_on_the_object_drops_are_one_devices_or_refused(line: str) -> None:
    run = functools.partial(jobs.dropping, is_patched=True)
    expected, _ = run("single")
    for outcome in testing.run_outcomes(run, mw.Plan.parse(line).num_ranks, line):
        if outcome.error is None:
            assert outcome.result[0] == pytest.approx(expected, rel=1e-11)
        else:  # shapes of another stage's layer, of which ranks hold parts
            assert line == "tp=2,pp=2"
            assert "has a forward of its own, set on the object" in str(outcome.error)
