"""Code that raises on one rank alone: the others end at once, with an error that says whose it was and what."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs import counting_jobs
from tests.parity.jobs import raising_jobs as jobs

from meshwright import testing
from meshwright.errors import UserCodeError, exit_code_of
from meshwright.testing.pool import RankPool

_SOON_S = 1.0
LINES = ["dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2"]


def _ended(line: str, where: str, step: int, *, num_ranks: int = 2, calls: str = "step") -> None:
    job = functools.partial(jobs.raised, line, where, step, rank=num_ranks - 1, calls=calls)
    _check([outcome.result for outcome in testing.run_outcomes(job, num_ranks)], where)


def _check(ended: list[jobs.Ended], where: str) -> None:
    *others, guilty = ended
    assert guilty.kind == {"index": "IndexError", "interrupt": "KeyboardInterrupt"}.get(where, "UnfitError")
    for other in others:
        assert f"rank {len(others)} cannot go on: {guilty.kind}: {guilty.text}" in other.text
        assert "fix: " in other.text
        assert other.exit_code == UserCodeError.exit_code
        assert other.ended_at - guilty.ended_at < _SOON_S


@pytest.mark.parametrize("line", ["dp=2", "dp=2,micro_batches=2", *LINES])
@pytest.mark.parametrize("step", [0, 1])
def test_a_layer_that_raises_on_one_rank(line: str, step: int) -> None:
    _ended(line, "layer", step)


@pytest.mark.parametrize("line", ["dp=2", *LINES])
@pytest.mark.parametrize("where", ["hook", "post-accumulate", "gradient"])
def test_a_backward_that_raises_on_one_rank(line: str, where: str) -> None:
    _ended(line, where, 1)


@pytest.mark.parametrize("line", ["dp=2", *LINES])
def test_a_loss_that_raises_on_one_rank(line: str) -> None:
    _ended(line, "loss", 0)


@pytest.mark.parametrize("line", ["dp=2", *LINES, "pp=2,micro_batches=2"])
def test_a_rank_that_is_interrupted_in_its_forward(line: str) -> None:
    _ended(line, "interrupt", 1)


def test_a_refusal_of_one_rank_keeps_its_exit_code_and_fix() -> None:
    other, guilty = (outcome.result for outcome in testing.run_outcomes(jobs.unfit_batch, 2, "dp=2"))
    assert guilty.kind == other.kind == "ApplyError"
    assert other.text == f"rank 1 cannot go on: {guilty.text}"


def test_an_index_out_of_range_on_one_rank() -> None:
    _ended("dp=2,zero=3", "index", 1)


def test_an_evaluation_that_raises_on_one_rank() -> None:
    _ended("dp=2,zero=3", "layer", 1, calls="evaluate")


def test_ranks_of_other_groups_hear_of_it() -> None:
    _ended("dp=2,tp=2", "layer", 1, num_ranks=4)


@pytest.mark.parametrize("line", ["dp=2,zero=3", "tp=2"])
def test_without_shared_memory(line: str) -> None:
    pool = RankPool(env={"MESHWRIGHT_TRANSPORT": "gloo"})
    try:
        _check(pool.run(functools.partial(jobs.raised, line, "layer", 1), 2), "layer")
    finally:
        pool.close()


def test_an_error_of_all_ranks_leaves_their_groups_usable() -> None:
    outcomes = testing.run_outcomes(jobs.refused_and_trained, 2, "dp=2,zero=3")
    assert [outcome.error for outcome in outcomes] == [None, None]


def test_the_error_has_the_exit_code_of_the_users_code() -> None:
    assert exit_code_of(UserCodeError("rank 1 cannot go on", rank=1)) == 10


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved,virtual=2", "zbv"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_count_that_an_error_left_uneven_is_one_devices_or_refused(schedule: str, micro_batches: int) -> None:
    expected = counting_jobs.losses(f"single,micro_batches={micro_batches}")
    plan = f"pp=2,schedule={schedule},micro_batches={micro_batches}"
    for found in testing.run_ranks(counting_jobs.losses, 2, plan):
        assert found[:2] == pytest.approx(expected[:2], rel=1e-11)
        assert found[2] == "ValueError"
        for mine, theirs in zip(found[3:], expected[3:], strict=True):
            assert mine == "OtherWayError" or mine == pytest.approx(theirs, rel=1e-11)


def test_a_batch_that_is_one_whole_is_joined_or_named() -> None:
    assert testing.run_ranks(jobs.notes_of_a_graph_in_parts, 2, "dp=2") == ["", ""]
    for text in testing.run_ranks(jobs.notes_of_a_graph_in_parts, 2, "dp=2,batch=split"):
        assert "called with a part of the batch, 3 samples" in text
        assert "pass split=" in text
