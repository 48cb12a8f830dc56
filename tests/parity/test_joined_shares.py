"""Plans with dp whose ranks join their shares by themselves, since the first batch shows that samples see one another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.jobs import joined_shares_jobs as joined
from tests.parity.jobs import whole_batch_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing
from meshwright.measure.verify import verify_plan

PLANS = ["dp=2", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=0", "dp=2,tp=2", "dp=2,pp=2"]

plainly = functools.cache(jobs.plainly)


def assert_one_device_s(found: dict[str, Any], kind: str, change: str = "") -> None:
    losses, gradients, state = plainly(kind, change)
    assert found["losses"] == pytest.approx(losses, rel=FLOAT64)
    for own, wanted in zip(found.get("gradients", []), gradients, strict=False):
        for name, gradient in wanted.items():
            torch.testing.assert_close(own[name], gradient, rtol=FLOAT64, atol=1e-13)
    for name, value in state.items():
        torch.testing.assert_close(found["state"][name], value, rtol=FLOAT64, atol=1e-13)


@pytest.mark.parametrize("kind", ["Contrast", "Normed", "Centred", "Noisy"])
@pytest.mark.parametrize("line", PLANS)
def test_is_one_device_s(line: str, kind: str) -> None:
    num_shares = int(line[3])
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, kind, line):
        assert_one_device_s(found, kind)
        assert found["samples"] == [jobs.NUM_SAMPLES] * jobs.STEPS
        assert found["evaluated"]["num_samples"] == jobs.NUM_SAMPLES
        assert found["place"][1] == num_shares
        (told,) = [reason for reason in found["reasons"] if reason.startswith("batch:")]
        assert f"each of the {num_shares} dp ranks computes all samples" in told
        assert any(
            text in told for text in ("do not give one device's", "nothing shows that parts give one device's loss")
        )


@pytest.mark.parametrize("kind", ["Contrast", "Noisy"])
@pytest.mark.parametrize(
    "line",
    [
        "pp=2,micro_batches=2",
        "pp=2,micro_batch_size=3,schedule=zb-h1",
        "pp=2,micro_batches=3,schedule=gpipe",
        "dp=2,pp=2,micro_batches=2",
        "tp=2,pp=2,micro_batches=3",
    ],
)
def test_a_pipeline_joins_its_micro_batches(line: str, kind: str) -> None:
    plan = mw.Plan.parse(line)
    for found in testing.run_ranks(jobs.train, plan.num_ranks, kind, line):
        assert_one_device_s(found, kind)
        told = [reason for reason in found["reasons"] if reason.startswith("batch:")]
        assert len(told) == plan.dp
        assert "the pipeline takes each batch as one micro-batch" in told[-1]


@pytest.mark.parametrize("line", ["pp=2,micro_batches=3", "dp=2,pp=2,micro_batches=2"])
def test_a_pipeline_joins_micro_batches_that_the_model_cannot_take(line: str) -> None:
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, "Several", line):
        assert_one_device_s(found, "Several")
        assert any("and the whole batch has a loss" in reason for reason in found["reasons"])


@pytest.mark.parametrize("line", ["dp=2,zero=2", "dp=2,pp=2,micro_batches=2"])
def test_one_share_that_the_model_cannot_take_is_joined(line: str) -> None:
    for found in testing.run_ranks(joined.longest, mw.Plan.parse(line).num_ranks, line):
        assert found == pytest.approx(joined.longest("plain"), rel=FLOAT64)


# As a DeepSpeed configuration says it, whose accumulation is 1.
@pytest.mark.parametrize("line", ["dp=2,micro_batch_size=4", "dp=2,zero=3,whole_below=0,micro_batch_size=4"])
def test_a_size_of_micro_batches_that_cuts_no_share_keeps_none_from_joining(line: str) -> None:
    for found in testing.run_ranks(jobs.train, 2, "Contrast", line):
        assert_one_device_s(found, "Contrast")


def test_shares_that_are_cut_into_micro_batches_are_not_joined() -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, "Contrast", "dp=2,micro_batch_size=3"):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert "a share of 4 samples is cut into micro-batches, of at most 3" in "".join(outcome.error.__notes__)


@pytest.mark.parametrize("sizes", [(5, 2), (0, 7), (7, 0)])
def test_shares_may_be_uneven_or_empty(sizes: tuple[int, int]) -> None:
    outcomes = testing.run_outcomes(joined.shares, 2, "Contrast", "dp=2,zero=2", sizes)
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback_text
        assert_one_device_s(outcome.result, "Contrast")


# Whole batches are asked for there, where nothing is shown, and not needed: it goes on as it did.
@pytest.mark.parametrize("line", ["dp=2,batch=split", "dp=2,micro_batches=2"])
def test_what_nothing_is_shown_of_is_told_where_the_batch_is_cut(line: str) -> None:
    for found in testing.run_ranks(jobs.train, 2, "Noisy", line):
        assert not [reason for reason in found["reasons"] if reason.startswith("batch:")]
        assert any("could not be tried out" in reason for reason in found["reasons"])


def test_shares_of_which_nothing_is_shown_and_that_cannot_be_joined_are_trained_on() -> None:
    for found in testing.run_ranks(joined.shares, 2, "Noisy", "dp=2", (4, 3), "always"):
        assert any("could not be tried out" in reason for reason in found["reasons"])


def test_own_loops_are_told_of_it() -> None:
    for found in testing.run_ranks(jobs.train, 2, "Noisy", "dp=2", "own", "loss"):
        assert any("could not be tried out" in reason for reason in found["reasons"])


@pytest.mark.parametrize(
    ("kind", "sizes"), [("rolled", (1, 1)), ("mined", (2, 2)), ("whitened", (4, 4)), ("whitened", (6, 2))]
)
def test_what_shares_alone_do_not_show_is_shown_by_all_ranks(kind: str, sizes: tuple[int, int]) -> None:
    losses, _, state = jobs.plainly(kind, count=sum(sizes))
    for found in testing.run_ranks(joined.shares, 2, kind, "dp=2,zero=1", sizes):
        assert found["losses"] == pytest.approx(losses, rel=FLOAT64)
        for name, value in state.items():
            torch.testing.assert_close(found["state"][name], value, rtol=FLOAT64, atol=1e-13)


@pytest.mark.parametrize(
    ("line", "num_views"),
    [
        ("dp=2", 2),
        ("dp=4,zero=2", 2),
        ("dp=2,tp=2", 2),
        ("dp=4", 9),
        ("pp=2,micro_batches=2", 2),
        ("pp=2,micro_batches=8", 8),
    ],
)
def test_views_of_one_sample_on_two_ranks_are_seen(line: str, num_views: int) -> None:
    losses = joined.train_views("plain", num_views)
    for found in testing.run_ranks(joined.train_views, mw.Plan.parse(line).num_ranks, line, num_views):
        assert found == pytest.approx(losses, rel=FLOAT64)


@pytest.mark.parametrize("line", ["dp=2,batch=split", "dp=2,micro_batches=2", "tp=2,micro_batches=2"])
def test_views_of_one_sample_on_two_ranks_are_refused_where_shares_stay(line: str) -> None:
    for outcome in testing.run_outcomes(joined.train_views, 2, line):
        assert isinstance(outcome.error, mw.ApplyError), outcome
        assert "is not a mean over samples" in outcome.error.message


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0", "dp=2,tp=2"])
def test_small_terms_of_training_alone_are_seen_by_their_gradients(line: str) -> None:
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, "Nudged", line):
        assert_one_device_s(found, "Nudged")
        assert any("and the gradient of 'up.0.weight' by" in reason for reason in found["reasons"])


def test_rows_are_gathered_between_joined_steps() -> None:
    for found in testing.run_ranks(joined.gather_between, 2, "dp=2,zero=3,whole_below=0"):
        for own, wanted in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(own, wanted, rtol=FLOAT64, atol=1e-13)


def test_a_loss_may_gather_rows_by_itself() -> None:
    losses, state = joined.gather_in_loss("single")
    for found_losses, found in testing.run_ranks(joined.gather_in_loss, 3, "dp=3"):  # shares of 3, 2 and 2
        assert found_losses == pytest.approx(losses, rel=FLOAT64)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=FLOAT64, atol=1e-13)


@pytest.mark.parametrize("kind", ["Contrast", "Noisy", "Balanced", "Paired"])
def test_verify_joins_shares_as_a_run_does(kind: str) -> None:
    build, batches = functools.partial(jobs.build, kind), [jobs.batch(0), jobs.batch(1)]
    report = verify_plan(build, "dp=2,zero=1", batches, None)
    assert report.equal, report.to_text()
    assert any("each of the 2 dp ranks computes all samples" in note for note in report.notes)
    assert not verify_plan(build, "dp=2,batch=split", batches, None).equal


def test_an_own_loop_afterwards_is_refused() -> None:
    for outcome in testing.run_outcomes(joined.shares, 2, "Contrast", "dp=2", (4, 3), "loop"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "an own loop follows a step whose ranks have joined their shares" in outcome.error.message
        assert "batch=whole" in str(outcome.error.fix)


@pytest.mark.parametrize(
    ("change", "text"),
    [("key", "other forms"), ("width", "[5]"), ("number", "float32"), ("graph", "requires a gradient")],
)
def test_shares_of_other_forms_are_refused_on_every_rank(change: str, text: str) -> None:
    for outcome in testing.run_outcomes(joined.shares, 2, "Contrast", "dp=2,zero=1", (4, 3), change):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert "these cannot be joined" in outcome.error.message
        assert text in outcome.error.message


@pytest.mark.parametrize("form", ["class", "column", "default", "once", "pair", "twice"])
def test_batches_of_other_forms_are_joined(form: str) -> None:
    wanted = joined.train_noted(form, "plain")
    for found in testing.run_ranks(joined.train_noted, 2, form, "dp=2,zero=1"):
        assert found == pytest.approx(wanted, rel=FLOAT64)


def test_a_loss_of_the_user_s_is_one_device_s() -> None:
    for found in testing.run_ranks(jobs.train, 2, "Contrast", "dp=2,zero=2", "own_loss"):
        assert_one_device_s(found, "Contrast")


@pytest.mark.parametrize("line", ["dp=2,batch=split", "dp=2,micro_batches=2", "pp=2,batch=split,micro_batches=2"])
def test_what_cuts_the_batch_even_so_is_refused(line: str) -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, "Contrast", line):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "batch=whole" in str(outcome.error.fix)


@pytest.mark.parametrize(("line", "other"), [("dp=2,zero=3", "tp=2"), ("pp=2", "dp=2,zero=1"), ("dp=2", "dp=2")])
def test_a_checkpoint_goes_on_under_another_plan(line: str, other: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    testing.run_ranks(jobs.train, 2, "Contrast", line, "own", "step", folder)
    losses, gradients, _ = plainly("Contrast")
    for found in testing.run_ranks(jobs.train, 2, "Contrast", other, "own", "step", folder):
        assert found["losses"] == pytest.approx(losses[1:], rel=FLOAT64)
        for own, wanted in zip(found["gradients"], gradients[1:], strict=True):
            torch.testing.assert_close(own["scale"], wanted["scale"], rtol=FLOAT64, atol=1e-13)


@pytest.mark.parametrize("rng", ["global", "torch"])
def test_scripts_go_on_drawing_apart_for_their_shares(rng: str) -> None:
    (first, reasons), (second, _) = testing.run_ranks(joined.drawn_between, 2, "dp=2", rng)
    assert any("computes all samples" in reason for reason in reasons)
    for own, other in zip(first, second, strict=True):
        assert all(one != two for one, two in zip(own, other, strict=True)), (own, other)


def test_lists_that_may_be_by_sample_are_refused() -> None:
    for outcome in testing.run_outcomes(joined.train_listed, 2, "dp=2"):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert "may be one a sample" in "".join(outcome.error.__notes__)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=0"])
@pytest.mark.parametrize(
    ("change", "text"), [("frozen", "of 'left.0.weight' was switched on rank(s) [1]"), ("replaced", "was replaced")]
)
def test_what_one_rank_changes_before_the_first_step_is_refused(line: str, change: str, text: str) -> None:
    for outcome in testing.run_outcomes(joined.early, 2, line, change, [1]):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert text in outcome.error.message


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=2", "dp=2,zero=3,whole_below=0"])
def test_what_all_ranks_freeze_before_the_first_step_stays_as_it_was(line: str) -> None:
    for found in testing.run_ranks(joined.early, 2, line, "frozen", [0, 1]):
        assert_one_device_s(found, "Contrast", "frozen")


@pytest.mark.parametrize(("line", "size"), [("dp=2", 2), ("dp=2,zero=3", 2), ("dp=2,tp=2", 4)])
@pytest.mark.parametrize("is_whole", [True, False])
def test_equal_shares_are_told_once(line: str, size: int, *, is_whole: bool) -> None:
    logged = [text for texts in testing.run_ranks(joined.logged, size, line, is_whole) for text in texts]
    assert sum("train on the same batch, value for value" in text for text in logged) == (size // 2 if is_whole else 0)


@pytest.mark.parametrize("kind", ["Paired", "Balanced"])
def test_a_loss_of_the_model_s_own_is_tried_with_its_draws(kind: str) -> None:
    for found in testing.run_ranks(joined.shares, 2, kind, "dp=2", (4, 3)):
        assert_one_device_s(found, kind)
        assert any("the model's own loss is not a mean over samples" in reason for reason in found["reasons"])


@pytest.mark.parametrize("loss", ["own", "as_sum"])
def test_what_draws_always_and_counts_samples_keeps_its_shares(loss: str) -> None:
    for found in testing.run_ranks(joined.shares, 2, "Counted", "dp=2", (4, 3), "", loss):
        assert_one_device_s(found, "Counted")
        assert not found["reasons"]
