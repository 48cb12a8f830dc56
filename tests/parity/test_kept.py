"""Backward code of a model's own, and what code keeps of one batch for the next: tried on the first batch, refused or equal."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.parity.jobs import kept_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

PLANS = [
    "dp=2",
    "dp=2,zero=2",
    "dp=2,zero=3,whole_below=0",
    "single,micro_batches=2",
    "pp=2,micro_batches=2",
    "dp=2,tp=2",
]
# The second joins its shares by itself.
WHOLE = ["dp=2,batch=whole", "dp=2", "dp=2,zero=3,whole_below=0,batch=whole", "tp=2"]
plainly = functools.cache(jobs.plainly)


def errors(kind: str, loss: str, line: str) -> list[BaseException | None]:
    num_ranks = mw.Plan.parse(line).num_ranks
    return [one.error for one in testing.run_outcomes(jobs.train, num_ranks, kind, loss, f"{line},batch=split")]


def assert_equal(kind: str, loss: str, line: str) -> None:
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, kind, loss, line):
        for name, value in plainly(kind, loss).items():
            torch.testing.assert_close(found[name], value, rtol=FLOAT64, atol=1e-13)


SLOPES = [
    ("ScaledSlopes", "pairs", "a hook on a tensor (register_hook) changes gradients"),
    ("CentredSlopes", "pairs", "the autograd function Centre changes gradients"),
    ("LayerHook", "pairs", "a backward hook of a module changes gradients"),
    ("WeightSlopes", "pairs", "the autograd function Sign changes gradients"),
    ("ClippedSlopes", "as_sum", "a hook on a tensor (register_hook) changes gradients"),
    ("DroppedSlopes", "pairs", "a hook on a tensor (register_hook) changes gradients"),
    ("Base", "balanced", "with gradients enabled the loss is"),
    ("Base", "Averaged", "code of its own in backward changes gradients"),
    ("NodeHook", "pairs", "changes gradients"),
    ("InCheckpoint", "pairs", "a hook on a tensor (register_hook) changes gradients"),
    ("ByHand", "pairs", "a hook on a tensor (register_hook) changes gradients: that of 'up.bias'"),
]
KEPT = [
    ("KeptTensor", "pairs", "KeptTensor.kept"),
    ("KeptNumbers", "as_sum", "KeptNumbers.history"),
    ("KeptSlope", "pairs", "KeptSlope.kept"),
    ("Base", "Centring", "Centring.centre"),
]


# Losses and forwards of parts gave the whole's, and it trained other parameters without a word: 0.0004 to 0.4.
@pytest.mark.parametrize(("kind", "loss", "says"), SLOPES)
@pytest.mark.parametrize("line", PLANS)
def test_gradients_that_parts_do_not_give_are_refused(line: str, kind: str, loss: str, says: str) -> None:
    for error in errors(kind, loss, line):
        assert isinstance(error, mw.ApplyError)
        assert says in error.message
        assert "batch=whole" in str(error.fix)


@pytest.mark.parametrize(("kind", "loss", "what"), KEPT)
@pytest.mark.parametrize("line", PLANS)
def test_what_is_kept_of_a_share_is_refused_and_of_a_micro_batch_told(
    line: str, kind: str, loss: str, what: str
) -> None:
    says = f"keeps something of one batch for the next ({what})"
    if mw.Plan.parse(line).dp == 1:
        for reasons in testing.run_ranks(jobs.told, mw.Plan.parse(line).num_ranks, kind, loss, line):
            assert any(says in reason for reason in reasons)
        return
    for error in errors(kind, loss, line):
        assert isinstance(error, mw.ApplyError)
        assert says in error.message
        assert "batch=whole" in str(error.fix)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("LaterSlopes", "a hook on a tensor (register_hook) changes gradients"),
        ("ReadSlope", "keeps something of one batch for the next (ReadSlope.kept)"),
        ("NormBefore", "of a second batch, the gradient of"),
        ("LaterHook", "a backward hook of a module changes gradients"),
        ("LaterOption", "mixes the samples"),
        ("LaterObject", "mixes the samples"),
        ("LaterFunction", "mixes the samples"),
    ],
)
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=2", "dp=2,zero=3,whole_below=0"])
def test_hooks_that_come_later_and_slopes_that_are_read_are_refused(line: str, kind: str, says: str) -> None:
    for error in errors(kind, "pairs", line):
        assert isinstance(error, mw.ApplyError)
        assert says in error.message


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("ScaledSlopes", "pairs"),
        ("ClippedSlopes", "as_sum"),
        ("Base", "balanced"),
        ("KeptTensor", "pairs"),
        ("Base", "Centring"),
    ],
)
@pytest.mark.parametrize("line", WHOLE)
def test_with_the_batch_whole_it_is_one_device_s(line: str, kind: str, loss: str) -> None:
    assert_equal(kind, loss, line)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("ClippedSlopes", "pairs"),
        ("SignedSlopes", "pairs"),
        ("Base", "Logging"),
        ("Rows", "pairs"),
        ("Counted", "pairs"),
        ("CountedHook", "pairs"),
        ("Base", "Annealed"),
    ],
)
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0"])
def test_what_each_sample_has_for_itself_is_one_device_s(line: str, kind: str, loss: str) -> None:
    assert_equal(kind, loss, line)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=0"])
def test_a_forward_that_unfreezes_a_layer_is_refused_where_ranks_exchange_gradients(line: str) -> None:
    # Trials had unfrozen it a step early, or its gradients were not exchanged: 0.03 off, or ranks apart.
    for error in errors("Unfreezing", "pairs", line):
        assert isinstance(error, mw.ApplyError)
        assert "the forward has switched requires_grad of 'mid." in error.message


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0"])
def test_gradients_that_cannot_be_tried_are_told(line: str) -> None:
    for reasons in testing.run_ranks(jobs.fussy, 2, line):
        assert any(
            "could not be compared with those of the whole: it raised RuntimeError: not yet" in r for r in reasons
        )


@pytest.mark.parametrize("line", ["tp=2", "pp=2"])
def test_a_forward_that_unfreezes_a_layer_is_one_device_s_elsewhere(line: str) -> None:
    assert_equal("Unfreezing", "pairs", line)


def test_trials_put_back_what_a_backward_hook_of_a_layer_counts() -> None:
    assert_equal("CountedHook", "pairs", "tp=2")  # 0.15 off, since the search for a layout counted on


@pytest.mark.parametrize(
    ("kind", "loss", "name"),
    [
        ("Base", "Annealed", "variable 'Annealed.calls'"),
        ("CountedHook", "pairs", "variable 'COUNTS'"),
        ("DrawnKept", "pairs", "attribute 'kept'"),
        ("CountedApart", "pairs", "attribute 'iterator', variable 'Counts.calls', attribute 'array'"),
    ],
)
@pytest.mark.parametrize("line", ["single,micro_batches=2", "dp=2,micro_batches=2"])
def test_what_each_micro_batch_counts_outside_of_modules_is_told(line: str, kind: str, loss: str, name: str) -> None:
    for reasons in testing.run_ranks(jobs.told, mw.Plan.parse(line).num_ranks, kind, loss, line):
        assert any(f"each micro-batch changes {name}" in reason for reason in reasons)


def test_a_loss_that_keeps_its_values_for_people_is_not_told() -> None:
    (reasons,) = testing.run_ranks(jobs.told, 1, "Base", "Logging", "single,micro_batches=2")
    assert not any("micro-batch changes" in reason for reason in reasons)


@pytest.mark.parametrize("line", ["pp=2,micro_batches=2", "dp=2"])
@pytest.mark.parametrize("kind", ["Base", "CountedHook"])
def test_hooks_of_the_package_and_of_other_stages_are_no_other_hooks(kind: str, line: str) -> None:
    for warnings in testing.run_ranks(jobs.warned, 2, kind, line):
        assert not any("other hooks" in text for text in warnings)


# Trials do not see it: eval mode leaves out what training keeps.
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0"])
def test_what_ranks_keep_of_their_samples_is_told_where_the_model_draws(line: str) -> None:
    for reasons in testing.run_ranks(jobs.told, 2, "DrawnKept", "pairs", line):
        assert any("each rank's own samples (or none) change attribute 'kept'" in reason for reason in reasons)


# With the first batch the average is that batch's loss, and shows nothing.
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0"])
def test_a_loss_by_its_own_average_is_refused_with_the_second_batch_where_the_model_draws(line: str) -> None:
    for outcome in testing.run_outcomes(jobs.told, 2, "Noisy", "Averaged", line):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert "with the same random numbers" in outcome.error.message


def test_a_loss_that_ranks_keep_for_people_is_not_told_where_the_model_draws() -> None:
    for reasons in testing.run_ranks(jobs.told, 2, "Noisy", "Logging", "dp=2"):
        assert not any("own samples" in reason for reason in reasons)


def test_a_note_that_one_rank_keeps_on_a_layer_of_torch_is_told() -> None:
    heard = testing.run_ranks(jobs.noted, 2)[0]  # by the first rank
    assert any("attribute 'largest' of module 'mid' was changed between steps" in text for text in heard)


# A rank without a sample made no call, and counted none: 0.06 off, without a word.
@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0"])
def test_what_a_rank_without_samples_does_not_count_is_told(line: str) -> None:
    for reasons in testing.run_ranks(jobs.short, 2, line):
        assert any("own samples (or none) change attribute 'kept'" in reason for reason in reasons)


# Ranks with two and with three samples have other trials: none was run, without a word (0.37, 0.003).
@pytest.mark.parametrize("line", ["dp=2,zero=2", "dp=2,zero=3,whole_below=0"])
@pytest.mark.parametrize(
    ("kind", "says"), [("ScaledSlopes", "changes gradients"), ("KeptTensor", "keeps something of one batch")]
)
@pytest.mark.parametrize("num_samples", [1, 5])
def test_trials_run_with_uneven_shares_too(num_samples: int, kind: str, says: str, line: str) -> None:
    for outcome in testing.run_outcomes(jobs.uneven, 2, kind, f"{line},batch=split", num_samples):
        assert isinstance(outcome.error, mw.ApplyError)
        assert says in outcome.error.message
