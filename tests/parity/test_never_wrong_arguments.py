"""What layers write into their arguments, and operators whose shapes are not known without running them."""

from __future__ import annotations

import pytest
import torch
from tests.parity.jobs import never_wrong_arguments_jobs as jobs

import meshwright as mw
from meshwright import testing


@pytest.mark.parametrize(
    ("name", "plan"),
    [("caching", "tp=2"), ("caching", "tp=2,pp=2"), ("remembering", "tp=2"), ("sliding", "tp=2,pp=2")],
)
def test_an_inspection_leaves_arguments_as_they_were(name: str, plan: str) -> None:
    # A sentinel runs a layer twice more: neither run may show in what the layer is given, or in the object that collects.
    expected = jobs.run_plain(name)
    for found in testing.run_ranks(jobs.run_planned, mw.Plan.parse(plan).num_ranks, name, plan):
        for got, step in zip(found, expected, strict=True):
            assert got == pytest.approx(step, rel=1e-11)


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,tp=2"])
def test_a_forward_that_was_patched_on_is_proven_on_copies(plan: str) -> None:
    # It holds the layer itself: a proof on a copy would run that one, count its calls, and leave gradients on it.
    expected = jobs.run_plain("patched")
    for found in testing.run_ranks(jobs.run_planned, mw.Plan.parse(plan).num_ranks, "patched", plan):
        for got, step in zip(found, expected, strict=True):
            assert got == pytest.approx(step, rel=1e-11)


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,schedule=zbv"])
def test_an_operator_whose_shapes_torch_does_not_know(plan: str) -> None:
    expected = jobs.run_plain("grouped")
    for found in testing.run_ranks(jobs.run_planned, 2, "grouped", plan):
        for got, step in zip(found, expected, strict=True):
            assert got == pytest.approx(step, rel=1e-5)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2", "pp=2"])
def test_outputs_of_a_call_by_hand_may_be_written_over(plan: str) -> None:
    expected = jobs.plain_outputs() / 2.0
    for found in testing.run_ranks(jobs.divide_outputs, 2, plan):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_a_tensor_without_values_that_code_has_cached_is_refused() -> None:
    # Its memory is none: the exchange of such gradients ended the process.
    outcomes = testing.run_outcomes(jobs.step_after_a_trial, 2)
    assert all(isinstance(outcome.error, mw.ApplyError) for outcome in outcomes)
    assert all("keeps a tensor of a trial without values" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize("plan", ["pp=2", "tp=2", "tp=2,pp=2"])
def test_a_trial_leaves_no_tensor_in_the_cache_of_a_function(plan: str) -> None:
    # A stage runs other stages' layers without values; its own layers took what that had left in the cache.
    expected = jobs.run_plain("factored_stack")
    for found in testing.run_ranks(jobs.train_with_a_cache, mw.Plan.parse(plan).num_ranks, plan):
        for got, step in zip(found, expected, strict=True):
            assert got == pytest.approx(step, rel=1e-11)
