"""Buffers that a forward outside of a step moves on some ranks alone: they follow rank 0, before anything runs with them."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.parity.jobs import buffer_jobs as jobs
from tests.parity.over_gloo import is_over_gloo
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing


@pytest.mark.parametrize(
    "plan",
    ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=1", "dp=2,tp=2", "dp=2,pp=2", "dp=2,pp=2,zero=3"],
)
def test_an_evaluation_without_samples_on_a_rank_moves_its_buffers_too(plan: str) -> None:
    losses, seen = jobs.plain()
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(plan).num_ranks, plan):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == seen


@pytest.mark.parametrize(("ranks", "calls"), [((0,), 1), ((1,), 0), ((0, 1), 1)])
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_calls_by_hand_count_on_rank_0(plan: str, ranks: tuple[int, ...], calls: int) -> None:
    if is_over_gloo() and len(ranks) == 1:
        pytest.skip("ranks agree while forward runs: refused")
    losses, seen = jobs.plain(calls=calls)
    for found in testing.run_ranks(functools.partial(jobs.train, plan, by_hand=ranks), 2):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == seen


def test_where_ranks_agree_while_forward_runs_calls_on_some_alone_are_refused() -> None:
    job = functools.partial(jobs.train, "dp=2", shares_memory=False)
    for found in testing.run_ranks(functools.partial(job, by_hand=(0, 1)), 2):
        assert found[0] == pytest.approx(jobs.plain(calls=1)[0], rel=1e-12)
    for outcome in testing.run_outcomes(functools.partial(job, by_hand=(0,)), 2):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "buffers were changed only on rank(s) [0] of 2" in str(outcome.error)


@pytest.mark.parametrize(
    "plan", ["tp=2", "tp=2,recompute=full", "tp=2,pp=2", "tp=2,pp=2,micro_batches=1,recompute=full"]
)
def test_cut_buffers_take_what_a_part_that_ran_whole_has_left_in_them(plan: str) -> None:
    expected = jobs.statistics("single")
    for found in testing.run_ranks(jobs.statistics, mw.Plan.parse(plan).num_ranks, plan):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2"])
def test_buffers_that_follow_a_rank_s_samples_are_told(plan: str) -> None:
    for kind in jobs.KINDS:
        for reasons in testing.run_ranks(jobs.reasons_of, 2, kind, plan):
            assert bool(reasons) is (kind in ("centre", "uncounted") and plan != "tp=2"), kind
            assert all("'1.centre'" in reason for reason in reasons)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=1", "dp=2,tp=2"])
def test_a_buffer_that_is_written_later_is_told(plan: str) -> None:
    """The first three steps were looked at alone."""
    for reasons in testing.run_ranks(jobs.late_reasons, mw.Plan.parse(plan).num_ranks, plan):
        assert len(reasons) == 1
        assert "'1.centre'" in reasons[0]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=1", "dp=2,pp=2"])
def test_buffers_whose_writes_torch_does_not_count_follow_rank_0(plan: str) -> None:
    found = testing.run_ranks(jobs.centre_after, mw.Plan.parse(plan).num_ranks, plan)
    stages = [found[:2], found[2:]] if len(found) > 2 else [found]
    for first, second in stages:
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("plan", ["dp=1,micro_batches=2", "pp=2,micro_batches=2", "tp=2,micro_batches=2"])
def test_buffers_that_each_micro_batch_changes_are_told(plan: str) -> None:
    names = {"uncounted": "1.centre", "centre": "1.centre", "spectral": "1.linear.parametrizations.weight.0._u"}
    for kind in jobs.KINDS:
        for reasons in testing.run_ranks(jobs.reasons_of, mw.Plan.parse(plan).num_ranks, kind, plan):
            told = [reason for reason in reasons if "of each micro-batch" in reason]
            assert len(told) == (kind in names or kind == "count"), kind
            assert all(f"'{names.get(kind, '1.')}" in reason for reason in told)
    assert not testing.run_ranks(jobs.reasons_of, 1, "centre", "dp=1,micro_batches=1")[0]


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,zero=1"])
def test_what_is_written_under_another_name_is_every_stage_s(plan: str) -> None:
    losses, state = jobs.train_under_another_name("single")
    for found, values in testing.run_ranks(jobs.train_under_another_name, mw.Plan.parse(plan).num_ranks, plan):
        assert found == pytest.approx(losses, rel=FLOAT64)
        testing.assert_parity(values, state, FLOAT64)
