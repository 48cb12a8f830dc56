"""What a loss counts is tried out on the first batch; a loss that parts of a batch do not give is refused before the step."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.parity.jobs import loss_jobs, never_wrong_loss_shares, uncut_jobs
from tests.tolerances import FLOAT32, FLOAT64

import meshwright as mw
from meshwright import testing

NOT_A_MEAN = ["contrastive", "spread", "largest", "total", "root", "class_weights"]
ALIKE = (12, 12, 12, 12)


def _assert_own_loss_is_equal(records: list[testing.StepRecord], name: str) -> None:
    batches = [loss_jobs.own_batch(name, rows=ALIKE), loss_jobs.own_batch(name)]
    expected = testing.oracle_steps(functools.partial(loss_jobs.build_own, name), batches)
    for record, plain in zip(records, expected, strict=True):
        assert record.loss == pytest.approx(plain.loss, rel=FLOAT32)
        testing.assert_parity(record.gradients, plain.gradients, FLOAT32)


@pytest.mark.parametrize(
    "name",
    ["gpt2", "wrapped", "bart", "t5", "llava", "bert", "classifier", "regression", "vit", "row_mean"],
)
def test_the_labels_of_a_models_own_loss_are_counted_as_it_counts_them(name: str) -> None:
    # The first batch has rows that count alike: only labels that are ignored on trial tell what is counted.
    _assert_own_loss_is_equal(loss_jobs.own_steps(name, "single,micro_batches=2"), name)


@pytest.mark.parametrize(
    ("name", "line"), [("wrapped", "dp=2"), ("bart", "dp=2,zero=3"), ("wrapped", "pp=2,micro_batches=2")]
)
def test_ranks_count_labels_alike(name: str, line: str) -> None:
    if "pp" in line:
        name = "row_mean"
    for records in testing.run_ranks(loss_jobs.own_steps, 2, name, line):
        _assert_own_loss_is_equal(records, name)


def test_an_auxiliary_loss_of_experts_is_no_mean_over_labels() -> None:
    with pytest.raises(mw.ApplyError, match="the model's own loss is not a mean over samples") as caught:
        loss_jobs.own_steps("mixtral_aux", "single,micro_batches=2")
    assert "meshwright.Loss" in (caught.value.fix or "")


@pytest.mark.parametrize("name", ["mlp", "dropout", "batch_norm"])
def test_a_loss_that_parts_do_not_give_is_refused_before_the_first_step(name: str) -> None:
    refused = loss_jobs.try_losses(name, "single,micro_batches=2", NOT_A_MEAN)
    for message, fix, _ in refused:
        assert "what loss_fn returned is" in message
        assert "meshwright.Loss" in (fix or "")
    assert "is a sum over samples" in refused[NOT_A_MEAN.index("total")][0]
    fine = ["mean_square", "contrastive_as_sum", "total_as_sum"]
    assert [message for message, _, _ in loss_jobs.try_losses(name, "single,micro_batches=2", fine)] == ["", "", ""]
    whole = loss_jobs.try_losses(name, "single", NOT_A_MEAN)  # nothing is cut
    assert [message for message, _, _ in whole] == [""] * len(NOT_A_MEAN)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0B", "pp=2,micro_batches=2", "tp=2,micro_batches=2"])
@pytest.mark.parametrize("num_samples", [7, 2])
def test_every_rank_refuses(line: str, num_samples: int) -> None:
    # With two samples a rank of dp=2 has one: it is tried beside a second one that is made of it.
    losses = ["contrastive", "largest", "mean_square"]
    per_rank = testing.run_ranks(loss_jobs.try_losses, 2, "mlp", f"{line},batch=split", losses, num_samples)
    assert per_rank[0] == per_rank[1]
    contrastive, largest, mean = per_rank[0]
    assert "is not a mean over samples" in contrastive[0]
    assert "is not a mean over samples" in largest[0]
    assert mean == ("", None, [])


def test_a_rank_without_a_sample_decides_as_the_others_do() -> None:
    per_rank = testing.run_ranks(loss_jobs.try_losses, 3, "mlp", "dp=3,batch=split", ["contrastive", "mean_square"], 2)
    assert per_rank[0] == per_rank[1] == per_rank[2]
    assert "is not a mean over samples" in per_rank[0][0][0]
    assert per_rank[0][1][0] == ""


def test_a_model_that_mixes_samples_is_named() -> None:
    (message, fix, _), tp = loss_jobs.try_losses("centred", "single,micro_batches=2", ["mean_square", "total_as_sum"])
    assert "the model's forward mixes the samples of a batch" in message
    assert "micro_batches=1, and batch=whole or dp=1" in (fix or "")
    assert tp[0] == ""


@pytest.mark.parametrize("line", ["dp=2,batch=split", "dp=2,zero=3,whole_below=0B,batch=split", "dp=2,zero=1", "tp=2"])
def test_the_fix_of_a_mixing_model_works(line: str) -> None:
    per_rank = testing.run_ranks(loss_jobs.try_losses, 2, "centred", line, ["mean_square"])
    assert all(found[0][0] == per_rank[0][0][0] for found in per_rank)
    assert bool(per_rank[0][0][0]) == ("batch=split" in line)


@pytest.mark.parametrize("line", ["single,micro_batches=2", "dp=2"])
@pytest.mark.parametrize(("loss", "ignored"), [("token_mean", -100), ("pad_mean", 0)])
def test_a_cross_entropy_that_ignores_labels_is_weighted_by_those_that_count(
    line: str, loss: str, ignored: int
) -> None:
    # A mean over labels from loss_fn: weighted by samples it was off by percents, without a word.
    rows = [ALIKE, (12, 11, 3, 2)]
    args = (line, loss, rows, ignored)
    per_rank = testing.run_ranks(loss_jobs.token_steps, 2, *args) if "dp" in line else [loss_jobs.token_steps(*args)]
    batches = [loss_jobs.token_pairs(each, ignored) for each in rows]
    expected = testing.oracle_steps(functools.partial(loss_jobs.build, "tokens"), batches, getattr(loss_jobs, loss))
    for records in per_rank:
        testing.assert_parity(records, expected, FLOAT64)


def test_trials_leave_no_trace() -> None:
    module = loss_jobs.count_calls("single,micro_batches=2")
    assert module[:4] == [4, [3, 3, 3, 3], 4.0, 3]
    torch.manual_seed(4)
    plain = loss_jobs.build("counting")
    for step in range(2):
        for part in torch.split(loss_jobs.pairs(6, step)[0], 3):
            plain(part)
    assert torch.rand(()).item() == module[4]


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0B", "tp=2", "pp=2"])
@pytest.mark.parametrize("by_iterator", [False, True])
@pytest.mark.filterwarnings(
    "ignore:Pickle, copy, and deepcopy support will be removed from itertools"
)  # Python 3.12 and 3.13
def test_a_loss_that_counts_its_calls_counts_those_of_steps_alone(line: str, by_iterator: bool) -> None:
    build, batches = functools.partial(loss_jobs.build, "mlp"), [loss_jobs.pairs(6, seed) for seed in range(6)]
    expected = testing.oracle_steps(build, batches, loss_jobs.Annealed(by_iterator=by_iterator))
    args = (build, mw.Plan.parse(line), batches, loss_jobs.Annealed(by_iterator=by_iterator))
    for records in testing.run_ranks(testing.plan_steps, 2, *args):
        testing.assert_parity(records, expected, FLOAT64)


def test_a_weight_with_a_graph_is_refused() -> None:
    trained, held = loss_jobs.try_losses("mlp", "single", ["trained_weight", "held_weight"])
    assert "has a graph" in trained[0]
    assert "weight.detach()" in (trained[1] or "")
    assert held[0] == ""


def test_a_weight_with_a_graph_is_refused_on_ranks_without_a_share() -> None:
    outcomes = testing.run_outcomes(never_wrong_loss_shares.step_without_a_share, 2, "dp=2")
    assert all("weight of a meshwright.Loss has a graph" in str(outcome.error) for outcome in outcomes)


def test_a_negative_weight_is_refused_on_every_rank() -> None:
    per_rank = testing.run_ranks(loss_jobs.try_losses, 2, "mlp", "dp=2", ["negative_on_rank_1"])
    for found in per_rank:
        assert "negative or NaN" in found[0][0]


# -- batches that only their author can cut -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bags", "graphs"])
@pytest.mark.parametrize("line", ["single,micro_batches=2", "dp=2", "pp=2,micro_batches=2"])
def test_split_needs_no_count_of_samples_beside_the_targets(name: str, line: str) -> None:
    # Sizes in dim 0 differ: this was refused with "pass split=", which had been passed.
    args = (name, line)
    per_rank = (
        [uncut_jobs.uncut_steps(*args)] if "single" in line else testing.run_ranks(uncut_jobs.uncut_steps, 2, *args)
    )
    batch = uncut_jobs.UNCUT[name][1](5)
    expected = testing.oracle_steps(functools.partial(uncut_jobs.build_uncut, name), [batch], loss_jobs.mean_square)
    for records in per_rank:
        testing.assert_parity(records, expected, FLOAT64)


def test_a_split_that_loses_samples_is_refused() -> None:
    with pytest.raises(
        mw.ApplyError, match=r"cut a batch of 5 samples into 2 parts, and returned 1 with \[3\] samples"
    ):
        uncut_jobs.losing_step()
