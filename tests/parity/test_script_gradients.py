"""Gradients that a script's code takes, hooks or leaves: equal to one plain process, or refused."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from tests.parity.jobs import script_gradient_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

PARTS = "single,micro_batches=2"


@pytest.mark.parametrize("hooks", ["each", "once"])
def test_hooks_that_a_forward_registers_are_there_once(hooks: str) -> None:
    found, wanted = jobs.steps(PARTS, "square", hooks), jobs.plain_steps("square", hooks)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=FLOAT64)
    testing.assert_parity(found["state"], wanted["state"], FLOAT64)


def test_a_hook_on_a_weight_that_was_gathered_for_one_call_is_refused_at_the_next() -> None:
    for outcome in testing.run_outcomes(jobs.steps, 2, "tp=2", "square", "once"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "has registered once on 'up.weight'" in str(outcome.error)
    wanted = jobs.plain_steps("square", "each")
    for found in testing.run_ranks(jobs.steps, 2, "tp=2", "square", "each"):
        testing.assert_parity(found["state"], wanted["state"], FLOAT64)


def test_a_penalty_on_gradients_inside_of_the_loss_is_tried_with_its_graph() -> None:
    found, wanted = jobs.steps(PARTS, "each", "none"), jobs.plain_steps("each", "none")
    assert found["losses"] == pytest.approx(wanted["losses"], rel=FLOAT64)
    testing.assert_parity(found["state"], wanted["state"], FLOAT64)
    with pytest.raises(mw.ApplyError, match="is not a mean over samples"):
        jobs.steps(PARTS, "all", "none")


@pytest.mark.parametrize("plan", ["dp=2,zero=2", "dp=2,zero=3,whole_below=1", "pp=2,micro_batches=2"])
def test_gradients_that_a_loss_takes_of_outputs_are_tried_where_ranks_hold_parts(plan: str) -> None:
    wanted = jobs.plain_steps("each", "none")
    for found in testing.run_ranks(jobs.steps, 2, plan, "each", "none"):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=FLOAT64)
    for outcome in testing.run_outcomes(jobs.steps, 2, f"{plan},batch=split", "all", "none"):
        assert "is not a mean over samples" in str(outcome.error)


def test_a_backward_inside_of_the_loss_is_refused_where_the_batch_is_cut() -> None:
    with pytest.raises(mw.ApplyError, match=r"runs backward\(\) itself"):
        jobs.steps(PARTS, "backward", "none")
    assert jobs.steps("single", "backward", "none")["losses"] == pytest.approx(
        jobs.plain_steps("backward", "none")["losses"], rel=FLOAT64
    )


@pytest.mark.parametrize(
    "plan", ["dp=2", "tp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=1KiB", "dp=2,zero=3,whole_below=1"]
)
def test_momentum_moves_a_frozen_layer_whose_gradients_are_zeros(plan: str) -> None:
    for by_model in (False, True):
        for found in testing.run_ranks(jobs.frozen_under, 2, plan, by_model):
            testing.assert_parity(found, jobs.frozen_plain(), FLOAT64)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=1", "tp=2"])
@pytest.mark.parametrize("who", ["in place", "by the model"])
def test_gradients_that_one_rank_alone_zeroes_before_another_backward_are_refused(plan: str, who: str) -> None:
    what = f"zeroed {who}, then another backward"
    for outcome in testing.run_outcomes(functools.partial(jobs.done_by_one_rank, by_all=False), 2, plan, what):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "gradient" in str(outcome.error)
    first, second = testing.run_ranks(functools.partial(jobs.done_by_one_rank, by_all=True), 2, plan, what)
    assert first == second


WRITTEN = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=1"]


@pytest.mark.parametrize("plan", WRITTEN)
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_that_each_rank_scales_by_its_own_number_are_refused(plan: str, times: int) -> None:
    told = r"has multiplied gradients by different numbers.*1, 1\.5" if "zero" in plan else "has written gradients of"
    with pytest.raises(mw.ApplyError, match=told):
        testing.run_ranks(jobs.written_under, 2, plan, "own", times)


@pytest.mark.parametrize("plan", WRITTEN)
def test_gradients_that_ranks_write_alike_are_one_devices(plan: str) -> None:
    for change, times in (("clamp", 1), ("scale", 1), ("clamp", 2), ("scale", 2)):
        for found in testing.run_ranks(jobs.written_under, 2, plan, change, times):
            testing.assert_parity(found, jobs.written_plain(change, times), FLOAT64)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=1", "tp=2"])
def test_a_limit_of_the_norm_that_depends_on_the_rank_is_refused_before_the_step(plan: str) -> None:
    for outcome in testing.run_outcomes(jobs.clip_in_other_ways, 2, plan, ((0.5,), (0.01,))):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "rank 0: backward, clip_grad_norm(0.5); rank 1: backward, clip_grad_norm(0.01)" in str(outcome.error)
    first, second = testing.run_ranks(jobs.clip_in_other_ways, 2, plan, ((0.5, 0.1), (0.5, 0.1)))
    assert first == second


def test_a_rank_that_clips_nothing_is_refused_where_ranks_hold_whole_gradients() -> None:
    for outcome in testing.run_outcomes(jobs.clip_in_other_ways, 2, "dp=2", ((0.5,), ())):
        assert "rank 0: backward, clip_grad_norm(0.5); rank 1: backward)" in str(outcome.error)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2"])
@pytest.mark.parametrize("what", ["not zeroed", "zeroed before the step", "eval", "eval of a step"])
def test_what_one_rank_alone_does_to_gradients_or_the_mode_is_refused(plan: str, what: str) -> None:
    told = {"eval": "training mode", "eval of a step": "whether the model is in training mode"}
    for outcome in testing.run_outcomes(functools.partial(jobs.done_by_one_rank, by_all=False), 2, plan, what):
        assert isinstance(outcome.error, mw.ApplyError)
        assert told.get(what, "have not done the same to the gradient") in str(outcome.error)
    first, second = testing.run_ranks(functools.partial(jobs.done_by_one_rank, by_all=True), 2, plan, what)
    assert first == second


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=1", "tp=2"])
@pytest.mark.parametrize(
    "what", ["one gradient set to None", "one gradient deleted", "one set to None, then another backward"]
)
def test_a_gradient_that_one_rank_alone_sets_to_none_is_refused(plan: str, what: str) -> None:
    for outcome in testing.run_outcomes(functools.partial(jobs.done_by_one_rank, by_all=False), 2, plan, what):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "have not done the same to the gradient" in str(outcome.error)
    first, second = testing.run_ranks(functools.partial(jobs.done_by_one_rank, by_all=True), 2, plan, what)
    assert first == second
    (alone,) = testing.run_ranks(functools.partial(jobs.done_by_one_rank, by_all=True), 1, "single", what)
    assert first == pytest.approx(alone, rel=FLOAT64)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3,whole_below=1", "tp=2"])
def test_a_scaler_of_the_gradient_is_refused_with_what_to_do_instead(plan: str) -> None:
    for outcome in testing.run_outcomes(jobs.scaled_by_torch, 2, plan):
        assert isinstance(outcome.error, mw.ApplyError)
        assert str(outcome.error.fix).startswith("leave torch.amp.GradScaler out")
    first, second = testing.run_ranks(jobs.scaled_by_torch, 2, "dp=2")  # as the fix says
    (alone,) = testing.run_ranks(jobs.scaled_by_torch, 1, "single")
    assert first == second == pytest.approx(alone, rel=FLOAT64)


@pytest.mark.parametrize("what", list(jobs.LOSSES_OF_OTHER_KINDS))
def test_a_loss_or_a_weight_that_is_no_real_number_is_refused(what: str) -> None:
    for outcome in testing.run_outcomes(functools.partial(jobs.done_by_one_rank, by_all=True), 2, "dp=2", what):
        assert isinstance(outcome.error, mw.ApplyError)
        assert outcome.error.fix


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2"])
def test_a_save_inside_of_an_accumulation_is_told(plan: str, tmp_path: Path) -> None:
    first, other = testing.run_ranks(jobs.saved_in_a_window, 2, plan, str(tmp_path))
    assert (first, other) == ([1, 2, 2, 2], [0] * 4)
