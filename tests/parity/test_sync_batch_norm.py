"""BatchNorm over the samples of all ranks: one device's losses, gradients, running statistics; refused where it cannot be."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.parity.jobs import synced_norm_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing


@pytest.mark.parametrize("name", ["images", "inside", "acting"])
@pytest.mark.parametrize("line", ["dp=2", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=0", "dp=2,tp=2"])
def test_is_one_device_s(line: str, name: str) -> None:
    losses, state = jobs.plainly(name)
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, name, line):
        assert found[0] == pytest.approx(losses, rel=FLOAT64)
        assert any("sync_batch_norm" in reason for reason in found[2])
        assert not any("rows of a share" in reason for reason in found[2])
        for key, value in state.items():
            torch.testing.assert_close(found[1][key], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("line", ["dp=2", "tp=2", "pp=2"])
def test_torch_s_own_synced_norms_are_refused_with_what_stands_for_them(line: str) -> None:
    for outcome in testing.run_outcomes(jobs.train_converted, 2, line):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "torch's SyncBatchNorm" in outcome.error.message
        assert "sync_batch_norm=True" in str(outcome.error.fix)


@pytest.mark.parametrize("name", ["acting", "teacher"])
@pytest.mark.parametrize("line", ["dp=2", "dp=2,tp=2"])
def test_a_rank_with_one_value_per_channel_is_one_device_s(line: str, name: str) -> None:
    # The norms of features see one value there; ranks that cut them beside ranks that cannot prove the cut would not agree.
    losses, state = jobs.plainly(name, 3)
    for found in testing.run_ranks(functools.partial(jobs.train, count=3), mw.Plan.parse(line).num_ranks, name, line):
        assert found[0] == pytest.approx(losses, rel=FLOAT64)
        for key, value in state.items():
            torch.testing.assert_close(found[1][key], value, rtol=1e-11, atol=1e-13)


def test_rows_that_are_chosen_by_their_place_in_a_share_are_told() -> None:
    for found in testing.run_ranks(functools.partial(jobs.train, count=8), 2, "chunks", "dp=2"):
        assert any("'norm' normalised 2 rows of a share of 4 samples" in reason for reason in found[2])


@pytest.mark.parametrize("name", ["repeated", "repeated, reentrant"])
def test_a_forward_that_backward_repeats_is_refused_on_all_ranks(name: str) -> None:
    # Reentrant, the repetition was normalised by the rank's own share: gradients 1.1 off, and nothing said.
    for outcome in testing.run_outcomes(jobs.train, 2, name, "dp=2"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "backward repeats the forward of 'norm'" in str(outcome.error)


def test_statistics_that_a_class_takes_by_itself_are_refused_unless_it_is_frozen() -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, "by hand", "dp=2"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "put 'norm' into eval mode" in str(outcome.error)
    losses, _ = jobs.plainly("by hand, frozen")
    for found in testing.run_ranks(jobs.train, 2, "by hand, frozen", "dp=2"):
        assert found[0] == pytest.approx(losses, rel=FLOAT64)


def test_with_dropout_it_is_one_process_s() -> None:
    losses, _, _ = testing.run_ranks(jobs.train, 1, "dropping", "single")[0]
    for found in testing.run_ranks(jobs.train, 2, "dropping", "dp=2"):
        assert found[0] == pytest.approx(losses, rel=FLOAT64)


def test_without_it_each_rank_normalises_its_share() -> None:
    losses, _ = jobs.plainly("images")
    for found in testing.run_ranks(functools.partial(jobs.train, is_synced=False), 2, "images", "dp=2"):
        assert abs(found[0][-1] - losses[-1]) > 1e-4
        assert any("BatchNorm layers (norm and 3 more) normalise over each rank's share" in text for text in found[2])
    assert not any("BatchNorm" in text for text in jobs.train("images", "single", is_synced=False)[2])


@pytest.mark.parametrize("line", ["pp=2", "dp=2,micro_batches=2", "dp=2,recompute=full"])
def test_is_refused_where_samples_come_in_parts(line: str) -> None:
    for outcome in testing.run_outcomes(jobs.train, 2, "images", line):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "takes all samples of a step at once" in str(outcome.error)
        assert "sync_batch_norm=False" in str(outcome.error)


def test_a_rank_without_a_sample_is_refused_on_all_ranks_with_its_fix() -> None:
    for outcome in testing.run_outcomes(functools.partial(jobs.train, count=2), 3, "images", "dp=3"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "at least 3 samples" in str(outcome.error)


def test_a_sample_that_is_not_finite_is_found_where_a_rank_has_it_alone() -> None:
    expected = testing.run_ranks(jobs.not_finite, 1, "single", "skip")[0]
    assert expected[0]
    for found in testing.run_ranks(jobs.not_finite, 2, "dp=2", "skip"):
        assert found == pytest.approx(expected, rel=FLOAT64)
    for outcome in testing.run_outcomes(jobs.not_finite, 2, "dp=2", "stop"):
        assert isinstance(outcome.error, mw.NonFiniteError)
        assert "rank 1" in str(outcome.error)


def test_a_forward_that_was_set_on_a_layer_is_refused() -> None:
    # It ran as it was, with the statistics of each rank's share: gradients 1.2 off.
    for outcome in testing.run_outcomes(jobs.with_own_forward, 2, "dp=2"):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "'norm' has a forward that was set on it" in str(outcome.error)


@pytest.mark.parametrize(
    ("what", "words"),
    [("no samples", "no sample in its share"), ("forward", "of the user's code"), ("loss", "out of bounds")],
)
def test_a_rank_that_cannot_go_on_says_why_and_the_others_name_it(what: str, words: str) -> None:
    # Over gloo the others waited in their norms until the time was over; over shared memory the reason was a disagreement.
    first, second = testing.run_outcomes(jobs.stopped, 2, what, "dp=2")
    assert words in str(second.error)
    assert not isinstance(second.error, mw.MeshwrightError) or what == "no samples"
    assert "rank 1 cannot" in str(first.error)


def test_an_evaluation_needs_no_sample_on_each_rank() -> None:
    expected = testing.run_ranks(jobs.evaluated, 1, "single")[0]
    for found in testing.run_ranks(jobs.evaluated, 3, "dp=3"):
        assert found == pytest.approx(expected, rel=FLOAT64)


def test_a_layer_outside_of_steps_is_torch_s_own() -> None:
    for is_own, result in testing.run_ranks(jobs.whole_after_training, 2, "dp=2"):
        assert is_own
        assert result.abs().max() < 1e-6  # of what it was given, on this rank
