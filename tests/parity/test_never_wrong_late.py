"""What shows after the first batch, and state that code keeps beside its modules: equal to one device, or refused in time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity.jobs import late_jobs as jobs
from tests.parity.jobs import late_lengths_jobs as lengths
from tests.parity.jobs import late_mixing_jobs as mixing
from tests.scopes import FULL_GRID

import meshwright as mw
from meshwright import testing

LATE = ["weighted", "selected", "in_place", "statistic", "hardest", "worst", "dice"]


def _refused(outcomes: list[Any], word: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, mw.ApplyError), f"rank {rank}: {outcome.error!r}"
        assert word in str(outcome.error), f"rank {rank}: {outcome.error}"


def _equal(block: str, found: Any, num_steps: int = 4) -> None:
    losses, state = jobs.plain(block, num_steps)
    assert found[0] == pytest.approx(losses, rel=1e-11)
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-12)


# -- losses ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2,micro_batches=2", "pp=2,micro_batches=2"])
def test_a_loss_that_stops_being_a_mean_is_refused_at_that_step(line: str) -> None:
    for name in LATE if line == "dp=2" else LATE[:2]:
        for step, message in testing.run_ranks(jobs.steps_until_refused, 2, name, line):
            assert (step, "is not a mean over samples, as it was for the first batch" in message) == (1, True), message


@pytest.mark.parametrize("name", LATE)
def test_a_loss_that_stops_being_a_mean_is_refused_under_accumulation(name: str) -> None:
    step, message = jobs.steps_until_refused(name, "single,micro_batches=2")
    assert step == 1
    assert "is not a mean over samples" in message


@pytest.mark.parametrize("name", ["weighted", "selected", "statistic"])
def test_a_late_change_is_seen_by_the_values_of_labels_and_of_the_loss(name: str) -> None:
    # Far behind the steps that are all looked at, and between two sentinels.
    step, message = jobs.steps_until_refused(name, "single,micro_batches=2", first=23)
    assert step == 23
    assert "is not a mean over samples" in message


def test_ranks_with_one_sample_compare_it_with_one_of_before() -> None:
    for step, message in testing.run_ranks(jobs.steps_until_refused, 2, "weighted", "dp=2", 2):
        assert (step, "is not a mean over samples" in message) == (1, True)


def test_an_evaluation_is_refused_alike() -> None:
    for step, message in testing.run_ranks(
        functools.partial(jobs.steps_until_refused, "weighted", "dp=2", evaluates=True), 2
    ):
        assert (step, "is not a mean over samples" in message) == (1, True)


@pytest.mark.parametrize("name", ["rows", "smoothed", "summed"])
@pytest.mark.parametrize("line", ["dp=2", "tp=2,micro_batches=2", "pp=2,micro_batches=2"])
def test_losses_that_stay_means_are_not_refused(name: str, line: str) -> None:
    assert testing.run_ranks(jobs.steps_until_refused, 2, name, line) == [(4, "")] * 2


def test_a_batch_that_is_left_whole_is_not_looked_at() -> None:
    assert jobs.steps_until_refused("weighted", "single") == (4, "")


TOGETHER = ["dp=2,zero=2", "dp=2,zero=3,whole_below=1", "dp=2,zero=3,micro_batches=2", "tp=2,micro_batches=2"]


@pytest.mark.parametrize("line", ["dp=2", "dp=2,micro_batches=2", "dp=2,zero=1", *TOGETHER])
def test_a_model_that_begins_to_mix_samples_is_refused_at_that_step(line: str) -> None:
    _refused(testing.run_outcomes(mixing.mixed_later, 2, line), word="mixes the samples of a batch")


@pytest.mark.parametrize("how", ["mode", "hook", "hook on a layer"])
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=1"])
def test_a_model_that_a_mode_or_a_hook_lets_mix_samples_is_refused_at_that_step(line: str, how: str) -> None:
    job = functools.partial(mixing.mixed_later, how=how)
    _refused(testing.run_outcomes(job, 2, line), word="mixes the samples of a batch")


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2", "pp=2,micro_batches=2"])
def test_a_models_own_collective_is_refused(line: str) -> None:
    _refused(testing.run_outcomes(mixing.reduced, 2, line), word="calls torch.distributed.all_reduce (")


@pytest.mark.parametrize("kind", ["Asking", "Choosing"])
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2", "pp=2,micro_batches=2"])
def test_a_model_that_asks_for_a_group_is_one_devices(line: str, kind: str) -> None:
    (expected,) = testing.run_ranks(mixing.reduced, 1, "single", kind)
    for losses in testing.run_ranks(mixing.reduced, 2, line, kind):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=2"])
def test_a_model_that_mixes_samples_of_batches_with_another_key_is_refused_at_that_step(line: str) -> None:
    _refused(testing.run_outcomes(mixing.mixed_where_masked, 2, line), word="mixes the samples of a batch")


@pytest.mark.parametrize(
    ("line", "step"), [("dp=2", 31), ("dp=2,zero=3", 31), *([("tp=2,micro_batches=2", 10)] if FULL_GRID else [])]
)
def test_a_model_that_mixes_after_many_calls_is_tried_again_at_doublings(line: str, step: int) -> None:
    assert testing.run_ranks(mixing.counted_up, 2, line) == [step] * 2


@pytest.mark.parametrize("line", ["dp=2,tp=2", "dp=2,tp=2,zero=2,micro_batches=2"])
def test_ranks_that_share_layers_refuse_samples_that_are_mixed_later(line: str) -> None:
    _refused(testing.run_outcomes(mixing.mixed_later, 4, line), word="mixes the samples of a batch")


@pytest.mark.parametrize("line", ["dp=2,zero=3,whole_below=1", "tp=2,micro_batches=2"])
def test_ranks_that_try_a_changed_model_together_go_on_where_it_mixes_nothing(line: str) -> None:
    for found in testing.run_ranks(mixing.scaled_later, 2, line):
        assert found == pytest.approx(mixing.scaled_later("single"), rel=1e-11)


def test_terms_of_gradients_that_one_rank_has_are_summed() -> None:
    assert testing.run_ranks(jobs.terms_on_one_rank, 2) == [[[5.0, 5.0], [3.0, 3.0], None]] * 2


# -- state beside modules -------------------------------------------------------------------------------------------------

OWN = ["OwnPython", "OwnNumpy", "OwnTorch", "OwnList"]
SHARED = ["GlobalCounter", "ClassCounter"]
GLOBAL = ["GlobalPython", "GlobalNumpy"]


@pytest.mark.parametrize("block", [*OWN, *SHARED, *GLOBAL])
@pytest.mark.parametrize("line", ["tp=2", "dp=2"])
def test_trials_proofs_and_inspections_put_back_what_they_draw_and_count(block: str, line: str) -> None:
    for found in testing.run_ranks(jobs.planned, 2, block, line, 3):
        _equal(block, found, 3)


@pytest.mark.parametrize("block", OWN)
def test_the_look_of_a_pipeline_puts_back_what_it_draws(block: str) -> None:
    for found in testing.run_ranks(jobs.planned, 2, block, "pp=2", 3):
        _equal(block, found, 3)


@pytest.mark.parametrize("block", [*OWN, *SHARED, *GLOBAL])
def test_a_layer_that_is_recomputed_draws_and_counts_as_the_first_time(block: str) -> None:
    _equal(block, jobs.planned(block, "single,recompute=full", 3), 3)


@pytest.mark.parametrize("block", SHARED)
def test_layers_of_several_stages_that_share_a_counter_are_refused(block: str) -> None:
    _refused(testing.run_outcomes(jobs.planned, 2, block, "pp=2", 2), word="which layer 'blocks.1' uses as well")


def test_ranks_that_share_layers_draw_the_same_of_python_and_numpy() -> None:
    first, second = testing.run_ranks(jobs.unseeded, 2, "tp=2")
    assert first == second


# -- one rank alone, and hooks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["dp=2", "dp=2,micro_batches=2", "dp=2,bucket_bytes=8B", "dp=2,zero=1"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_the_others_hear_of_a_rank_whose_loss_raises(line: str, evaluates: bool) -> None:
    other, guilty = testing.run_outcomes(functools.partial(jobs.raised_on_one_rank, line, evaluates=evaluates), 2)
    assert "this batch is no good" in str(guilty.error)
    assert isinstance(other.error, mw.UserCodeError)
    assert "rank 1 cannot go on" in str(other.error)


@pytest.mark.parametrize("line", ["dp=2,zero=1", "dp=2,zero=3,whole_below=1", "tp=2", "pp=2"])
@pytest.mark.parametrize(("kind", "later"), [("pre", False), ("post", True)])
def test_hooks_around_steps_are_refused_where_ranks_hold_parts(line: str, kind: str, later: bool) -> None:
    _refused(
        testing.run_outcomes(functools.partial(jobs.hooked, line, kind, later=later), 2), word="hooked.<locals>.clip"
    )


def test_hooks_around_steps_run_where_ranks_hold_whole_parameters() -> None:
    assert testing.run_ranks(functools.partial(jobs.hooked, "dp=2", "pre", later=True), 2) == [None, None]


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_pipeline_names_functional_call_from_a_later_step_on(evaluates: bool) -> None:
    outcomes = testing.run_outcomes(functools.partial(jobs.called_with_others_later, "pp=2", evaluates=evaluates), 2)
    _refused(outcomes, word="functional_call")


@pytest.mark.parametrize("kind", ["cropped", "table"])
def test_a_length_that_is_a_multiple_of_the_heads_is_not_cut_as_a_width(kind: str) -> None:
    # At lengths 6 and 8 a slice `[:8]` looks like one of two parts of a width.
    expected = lengths.plain(kind)
    for losses, is_cut in testing.run_ranks(lengths.planned, 2, kind):
        assert is_cut
        assert losses == pytest.approx(expected, rel=1e-11)


ENDING = [("mask", 1), ("mask", 6), ("classes", 1), ("classes", 6), ("buffer", 1), ("training", 2)]
ENDING_LINES = ["dp=2", "dp=2,zero=3,whole_below=0", "dp=2,pp=2", "dp=2,tp=2"]


# With what cut layers draw the loss is tried on the first batch alone, and stages are not looked at for a step's number.
UNSEEN = {("dp=2,tp=2", "training"), ("dp=2,pp=2", "buffer")}


@pytest.mark.parametrize(
    ("line", "how", "late"),
    [(line, *way) for line in ENDING_LINES for way in ENDING if (line, way[0]) not in UNSEEN],
)
def test_a_model_s_own_loss_that_is_a_mean_no_longer_is_refused(line: str, how: str, late: int) -> None:
    wanted = 7 if how == "buffer" else late  # nothing tells of the buffer but the eighth step's look
    for step, message in testing.run_ranks(
        mixing.own_loss_until_refused, mw.Plan.parse(line).num_ranks, line, how, late
    ):
        assert (step, "is not a mean over samples" in message) == (wanted, True), message
