"""transformers' Trainer under a plan: losses, logs, weights and predictions of transformers' own in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.parity.jobs import trainer_jobs as jobs

import meshwright as mw
from meshwright import testing
from meshwright.integrations.refusals import finite

PLANS = ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2"]
FLOAT64 = 1e-9
FLOAT32 = 2e-6
"""Of losses that transformers computes in float32 whatever the model's dtype is."""
IN_FLOAT32 = {"loss", "grad_norm", "train_loss", "eval_loss"}
"""Logs that transformers sums in float32."""


@functools.cache
def alone(kind: str) -> jobs.Found:
    return jobs.run(kind, None)


def under(plan: str, kind: str, directory: Any = None, resume: Any = None, **changes: Any) -> list[jobs.Found]:
    ranks = mw.Plan.parse(plan).num_ranks
    where, what = (None if path is None else str(path) for path in (directory, resume))
    return testing.run_ranks(jobs.under_plan, ranks, kind, plan, where, what, changes)


def assert_equal(found: jobs.Found, wanted: jobs.Found, bound: float) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=bound)
    assert found["state"].keys() == wanted["state"].keys()
    for name, value in wanted["state"].items():
        assert (found["state"][name] - value).abs().max() <= bound * max(value.abs().max().item(), 1e-2), name
    assert (found["predicted"] - wanted["predicted"]).abs().max() <= bound * wanted["predicted"].abs().max()
    assert [log.keys() for log in found["logs"]] == [log.keys() for log in wanted["logs"]]
    for log, other in zip(found["logs"], wanted["logs"], strict=True):
        for key, value in other.items():
            assert log[key] == pytest.approx(value, rel=FLOAT32 if key in IN_FLOAT32 else 1e-9), key


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["tokens", "regression"])
def test_a_run_is_one_process(kind: str, plan: str) -> None:
    for found in under(plan, kind):
        assert_equal(found, alone(kind), FLOAT64)


def test_what_workers_draw_is_one_process() -> None:
    options = {"dataloader_num_workers": 2, "num_train_epochs": 1, "eval_strategy": "no"}
    wanted = jobs.run("noisy", None, **options)
    for found in under("dp=2", "noisy", **options):
        assert_equal(found, wanted, FLOAT64)


@pytest.mark.parametrize("kind", ["classes", "popped"])
def test_ignored_labels_of_later_batches_count_as_in_one_process(kind: str) -> None:
    """Means by samples and by labels are one in the first batch; and a loss that takes the labels out of the batch."""
    for found in under("dp=2", kind):
        assert_equal(found, alone(kind), FLOAT64)


def test_data_is_shuffled_as_in_one_process_though_cut_layers_draw() -> None:
    for found in under("tp=2", "grouped"):
        assert_equal(found, alone("grouped"), FLOAT64)


def test_the_models_own_loss_is_one_process_in_its_float32() -> None:
    assert_equal(under("dp=2", "gpt")[1], alone("gpt"), FLOAT32)


def test_a_dataset_without_length_is_read_by_every_rank() -> None:
    for found in under("dp=2", "stream"):
        assert_equal(found, alone("stream"), FLOAT64)


def test_a_dataset_without_length_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Ranks had waited for the first one to hand the rest of its batches on."""
    saves = {"save_strategy": "steps", "save_steps": 2}
    jobs.run("stream", None, str(tmp_path), **saves)
    saved = tmp_path / "checkpoint-2"
    wanted = jobs.run("stream", None, str(tmp_path / "plain"), str(saved), **saves)
    for found in under("dp=2", "stream", tmp_path / "dp", saved, **saves):
        assert_equal(found, wanted, FLOAT64)


def test_the_way_of_weighing_matters_to_what_is_compared() -> None:
    # The control: the rows' numbers of labels differ, so that a mean of the ranks' means is another number.
    rows = jobs.Rows()
    counts = [(row["labels"] != -100).sum().item() for row in (rows[index] for index in range(3))]
    assert len(set(counts)) == 3


@pytest.mark.long
def test_a_run_resumes_under_another_plan_and_without(tmp_path: Path) -> None:
    under(PLANS[1], "tokens", tmp_path, save_strategy="steps", save_steps=2)
    saved = tmp_path / "checkpoint-2"
    for found in (
        under("tp=2", "tokens", tmp_path / "tp", saved, save_strategy="steps", save_steps=2)[0],
        jobs.run("tokens", None, str(tmp_path / "plain"), str(saved)),
    ):
        assert_rest_equal(found)


def test_a_plan_goes_on_with_what_one_process_has_saved(tmp_path: Path) -> None:
    jobs.run("tokens", None, str(tmp_path), save_strategy="steps", save_steps=2)
    assert_rest_equal(under("dp=2", "tokens", tmp_path / "dp", tmp_path / "checkpoint-2")[1])
    for outcome in testing.run_outcomes(
        jobs.under_plan, 2, "tokens", PLANS[1], str(tmp_path / "zero"), str(tmp_path / "checkpoint-2"), {}
    ):
        assert "resume it with plan='dp=2'" in str(outcome.error)


def assert_rest_equal(found: jobs.Found) -> None:
    """Compare a resumed run; the mean over all its steps is of the steps of this run alone."""
    wanted, left = alone("tokens"), len(found["losses"])
    assert 0 < left < len(wanted["losses"])

    def logs(run: jobs.Found) -> list[dict[str, Any]]:
        return [{key: value for key, value in log.items() if key != "train_loss"} for log in run["logs"]]

    rest = {**wanted, "losses": wanted["losses"][-left:], "logs": logs(wanted)}
    assert_equal({**found, "logs": logs(found)}, rest, FLOAT64)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("dp=2", marks=pytest.mark.long),
        "dp=2,zero=3,whole_below=1",
        pytest.param("tp=2", marks=pytest.mark.long),
    ],
)
def test_a_second_trainer_takes_the_model_from_the_first(plan: str, tmp_path: Path) -> None:
    wanted = jobs.one_after_another(None, str(tmp_path / "plain"))
    for found in testing.run_ranks(jobs.one_after_another, 2, plan, str(tmp_path / "plan")):
        testing.assert_parity(found["between"], wanted["between"], FLOAT64)
        testing.assert_parity(found["state"], wanted["state"], FLOAT64)
        assert "is a later Trainer's now" in found["refused"]


def test_dropout_is_drawn_again_when_a_run_resumes(tmp_path: Path) -> None:
    whole = under("dp=2", "dropout", tmp_path, save_strategy="steps", save_steps=2)[0]
    found = under("dp=2", "dropout", tmp_path, tmp_path / "checkpoint-2")[0]
    assert found["losses"] == pytest.approx(whole["losses"][-len(found["losses"]) :], rel=FLOAT64)
    assert whole["losses"] != pytest.approx(alone("tokens")["losses"], rel=1e-3)


def test_one_rank_logs_and_saves() -> None:
    assert testing.run_ranks(jobs.who_logs, 2, "dp=2") == [(True, True, False), (False, False, False)]


@pytest.mark.parametrize(
    ("kind", "word"),
    [("contrast", "compares samples"), ("balance", "compares samples"), ("norm", "normalises over the batch")],
)
def test_what_would_not_be_one_process_is_refused(kind: str, word: str) -> None:
    for outcome in testing.run_outcomes(jobs.under_plan, 2, kind, "dp=2", None, None, {}):
        assert isinstance(outcome.error, mw.ApplyError)
        assert word in str(outcome.error)
        assert "batch=whole" in str(outcome.error.fix)


def test_a_loss_that_compares_samples_is_one_process_with_whole_batches() -> None:
    for found in under("dp=2,zero=2,batch=whole", "contrast"):
        assert_equal(found, alone("contrast"), FLOAT64)


def test_a_loss_that_begins_to_count_otherwise_is_refused() -> None:
    changes = {"label_names": ["target"], "eval_strategy": "no"}
    for outcome in testing.run_outcomes(jobs.under_plan, 2, "hidden", "dp=2", None, None, changes):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "their mean weighted by samples, as it was for the first batch" in str(outcome.error)


def test_a_gradient_that_is_not_finite_is_refused_with_what_a_trainer_has() -> None:
    # The fix named an argument of apply_plan, which a Trainer does not pass on.
    assert finite(0.5, 3) == 0.5
    with pytest.raises(mw.NonFiniteError, match="gradient of step 3 is not finite") as caught:
        finite(float("nan"), 3)
    assert "learning_rate" in str(caught.value)


def test_other_batches_on_another_rank_are_refused() -> None:
    for outcome in testing.run_outcomes(jobs.other_batches, 2, "dp=2"):
        assert "have other batches" in str(outcome.error)


@pytest.mark.parametrize(
    ("plan", "changes", "word"),
    [
        ("pp=2", {}, "stages"),
        ("data_parallel,dp=2", {}, "threads"),
        ("dp=2,micro_batches=2", {}, "gradient_accumulation_steps"),
        (None, {"fp16": True}, "bf16=True"),
        (None, {"auto_find_batch_size": True}, "auto_find_batch_size=False"),
        (None, {"torch_compile": True}, "torch_compile=False"),
        (None, {"enable_jit_checkpoint": True}, "enable_jit_checkpoint=False"),
        ("tp=2", {"predict_with_generate": True}, "predict_with_generate=False"),
        (None, {"optim": "lomo"}, "adamw_torch"),
    ],
)
def test_arguments_that_do_not_go_with_a_plan_are_refused(
    plan: str | None, changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    from meshwright.integrations.hf_trainer import Trainer

    args = jobs.arguments(str(tmp_path), eval_strategy="no")
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(mw.ConfigError, match=word):
        Trainer(jobs.build("regression"), args, plan=plan)
