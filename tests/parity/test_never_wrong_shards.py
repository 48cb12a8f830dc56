"""Parameters of which a rank has a part, read and written by user code: equal to one process, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity.jobs import never_wrong_data_jobs as base
from tests.parity.jobs import never_wrong_shards_jobs as jobs

import meshwright as mw
from meshwright import testing

ZERO3 = "dp=2,zero=3,whole_below=0"
ALL = ["tp=2", "pp=2", "dp=2,zero=1", ZERO3]


def equal(plan: str, change: Any, build: Any = base.build_net) -> None:
    expected = base.plain(build, change)
    for found in testing.run_ranks(base.planned, mw.Plan.parse(plan).num_ranks, build, plan, change):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-11, atol=1e-13)
        for name, value in expected[1].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-12)


def refused(plan: str, change: Any, word: str, build: Any = base.build_net) -> None:
    for outcome in testing.run_outcomes(base.planned, mw.Plan.parse(plan).num_ranks, build, plan, change):
        assert isinstance(outcome.error, mw.ApplyError), repr(outcome.error)
        assert word in str(outcome.error), str(outcome.error)


READS = [jobs.norms, jobs.row_norms, jobs.rows, jobs.drawn, jobs.numbers]


@pytest.mark.parametrize("change", READS)
@pytest.mark.parametrize("plan", ["tp=2", ZERO3])
def test_values_of_parts_are_not_read_as_whole_ones(plan: str, change: Any) -> None:
    refused(plan, change, "model.whole_parameters()")


def test_a_norm_over_all_parameters_does_not_leave_other_stages_out() -> None:
    refused("pp=2", jobs.norms, "of another stage")


@pytest.mark.parametrize("change", [jobs.norms, jobs.row_norms, jobs.rows, jobs.drawn])
@pytest.mark.parametrize("plan", [*ALL, "dp=2,tp=2,zero=3,whole_below=0"])
def test_whole_values_are_read_and_written(plan: str, change: Any) -> None:
    equal(plan, jobs.Inside(change))


@pytest.mark.parametrize("change", [jobs.sums_of_gradients, jobs.clipped])
@pytest.mark.parametrize("plan", ALL)
def test_gradients_of_parts_are_not_read_as_whole_ones(plan: str, change: Any) -> None:
    refused(plan, change, "full_gradients()")


@pytest.mark.parametrize("change", [jobs.frozen_by_place, jobs.forgotten])
@pytest.mark.parametrize("plan", ALL)
def test_what_needs_no_values_is_as_on_one_device(plan: str, change: Any) -> None:
    equal(plan, change)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "dp=2,zero=1"])
def test_what_treats_each_entry_by_itself_is_as_on_one_device(plan: str) -> None:
    equal(plan, jobs.scaled)
    equal(plan, jobs.Average(first=1))


@pytest.mark.parametrize("plan", ["pp=2", "dp=2,pp=2,zero=1"])
def test_what_one_stage_holds_whole_is_written_by_it_and_not_refused_by_the_others(plan: str) -> None:
    equal(plan, jobs.first_written)


def test_what_one_stage_has_in_parts_is_refused_by_all_stages() -> None:
    refused("dp=2,pp=2,zero=3,whole_below=0", jobs.first_scaled, "mul_() of parameter 'inp.weight'")
    refused("tp=2,pp=2", jobs.first_written, "copy_()")
    equal("tp=2,pp=2", jobs.first_scaled)


def test_writing_over_what_is_put_aside_is_refused_by_name() -> None:
    refused(ZERO3, jobs.scaled, "mul_() of parameter 'inp.weight'")


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_an_average_from_before_the_cut_is_refused(plan: str) -> None:
    refused(plan, jobs.Average(first=0), "into a tensor of shape")
    refused(plan, jobs.Averaged(0, inside=False), "model.whole_parameters()")


@pytest.mark.parametrize("plan", [*ALL, "dp=2,pp=2"])
def test_an_averaged_model_is_updated_where_values_are_whole(plan: str) -> None:
    equal(plan, jobs.Averaged(1, inside=True))


@pytest.mark.parametrize("change", [jobs.unit_hooks, jobs.unit_hooks_after])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=1", ZERO3, "pp=2,micro_batches=2"])
def test_hooks_do_not_take_terms_of_gradients_for_gradients(plan: str, change: Any) -> None:
    refused(plan, change, "of the gradient of parameter")


@pytest.mark.parametrize("change", [jobs.linear_hooks, jobs.linear_hooks_after])
@pytest.mark.parametrize("plan", ["dp=2", *ALL])
def test_hooks_that_scale_gradients_are_right(plan: str, change: Any) -> None:
    equal(plan, change)


def test_hooks_do_not_write_into_running_sums() -> None:
    refused("pp=2,micro_batches=2", jobs.linear_hooks_after, "after each micro-batch")
    equal("pp=2,micro_batches=2", jobs.linear_hooks)


@pytest.mark.parametrize("change", [jobs.clip_in_hook, jobs.decay_in_hook])
@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=1", ZERO3])
def test_hooks_of_an_optimizer_do_not_take_parts_for_wholes(plan: str, change: Any) -> None:
    refused(plan, change, "max_grad_norm=")


def test_a_loss_does_not_read_parts_of_parameters_later() -> None:
    for outcome in testing.run_outcomes(jobs.penalized, 2, "tp=2"):
        assert isinstance(outcome.error, mw.ApplyError), repr(outcome.error)
        assert "of parameter 'inp.weight'" in str(outcome.error)


def test_code_between_layers_does_not_use_parts_of_parameters_later() -> None:
    refused("tp=2", jobs.switch_glue, "of parameter 'mid.0.0.weight'", jobs.build_glued)
    equal(ZERO3, jobs.switch_glue, jobs.build_glued)


# -- the optimizer's state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [jobs.momenta_halved, jobs.momenta_reset, jobs.momenta_of_groups, jobs.momenta_saved]
)
@pytest.mark.parametrize("plan", ALL)
def test_optimizer_state_is_changed_entry_by_entry(plan: str, change: Any) -> None:
    equal(plan, change)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (jobs.momenta_read, "the optimizer's 'momentum_buffer' of"),
        (jobs.momenta_read_of_dict, "the optimizer's 'momentum_buffer' of"),
        (jobs.momenta_read_by_parameter, "optimizer"),
        (jobs.momenta_of_elsewhere, "belongs to another optimizer"),
    ],
)
@pytest.mark.parametrize("plan", ALL)
def test_optimizer_state_of_parts_is_not_taken_for_the_whole(plan: str, change: Any, word: str) -> None:
    refused(plan, change, word)
