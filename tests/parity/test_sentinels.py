"""Faults on one rank, and that every rank is told before the optimizer: batches, weights, settings, random numbers, parts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.parity.jobs import sentinel_jobs as jobs
from tests.parity.jobs import sentinel_setting_jobs as setting_jobs

import meshwright as mw
from meshwright import testing

PLANS = {
    "dp=2": 2,
    "dp=2,zero=1": 2,
    "dp=2,zero=2": 2,
    "dp=2,zero=3": 2,
    "tp=2": 2,
    "pp=2": 2,
    "dp=2,tp=2": 4,
}
SHARING = ("tp=2", "pp=2", "dp=2,tp=2")
"""Plans under which ranks share layers."""
CUT = "dp=2,zero=3,whole_below=0"


def _told(plan: str, function: Any, *args: Any) -> list[dict[str, Any]]:
    """Run on the plan's ranks; the same must have been said on each."""
    per_rank = testing.run_ranks(function, PLANS.get(plan, 2), plan, *args)
    for told in per_rank[1:]:
        assert told["kind"] == per_rank[0]["kind"], per_rank
        assert (told["steps"], told["text"]) == (per_rank[0]["steps"], per_rank[0]["text"])
    return per_rank


def _assert_stopped(told: dict[str, Any], kind: str, steps: int, *words: str) -> None:
    assert (told["kind"], told["steps"]) == (kind, steps), told
    for word in words:
        assert word in told["text"], told["text"]


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", SHARING)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("other_row", ("batch[0] has other values", "in 1 of ", "row 1 first")),
        ("other_labels", ("batch[1] has other values",)),
        ("other_length", ("batch[0] has other shapes",)),
        ("no_batch", ("None, an empty share",)),
    ],
)
def test_another_batch_on_a_rank_that_shares_layers_is_refused(plan: str, fault: str, words: tuple[str, ...]) -> None:
    told = _told(plan, jobs.train, fault)[0]
    _assert_stopped(
        told, "ApplyError", jobs.FAULTY_STEP, "ranks [0, 1] share the model's layers", "ranks 0 and 1", *words
    )


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_shares_of_data_parallel_ranks_may_differ(plan: str) -> None:
    assert _told(plan, jobs.train, "other_row")[0]["kind"] is None


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "every"),
    # ZeRO gives every rank the owner's values after each step: only a sentinel of that very step sees another's copy.
    [("dp=2", 3), ("tp=2", 3), ("dp=2,tp=2", 3), ("dp=2,zero=1", 1), ("dp=2,zero=2", 1), ("dp=2,zero=3", 1)],
)
def test_one_flipped_bit_of_a_copy_of_a_small_model_is_found_in_the_next_step(plan: str, every: int) -> None:
    steps = jobs.FAULTY_STEP
    for told in _told(plan, jobs.train, "flip_bit", 8, every):
        _assert_stopped(told, "CorruptionError", steps, f"step {steps}, rank 1", "'blocks.0.norm.weight'")
        assert (told["part"], told["rank"], told["code"]) == ("blocks.0.norm.weight", 1, 15)


def test_zero_compares_nothing() -> None:
    assert _told("dp=2", jobs.train, "flip_bit", 8, 0)[0]["kind"] is None


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_what_the_optimizer_keeps_is_compared(plan: str) -> None:
    told = _told(plan, jobs.train, "flip_bit_of_state")[0]
    _assert_stopped(told, "CorruptionError", 3, "'blocks.0.norm.weight (the optimizer's exp_avg_sq)'")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_buffers_are_compared(plan: str) -> None:
    _assert_stopped(_told(plan, jobs.train, "flip_bit_of_buffer")[0], "CorruptionError", 3, "'scale'")


def test_a_loss_that_is_another_on_a_rank_is_found_in_the_next_step_and_what_it_came_of_is_named() -> None:
    told = _told("tp=2", jobs.train, "flip_bit_of_buffer", 8, 100)[0]
    _assert_stopped(told, "CorruptionError", jobs.FAULTY_STEP + 1, "'scale'", "'loss': the loss of step 2 is")
    assert told["losses"][jobs.FAULTY_STEP - 1] == _told("tp=2", jobs.train, "flip_bit", 2)[0]["losses"][-1]


def _part(plan: str) -> str:
    """Return the weight whose part is changed: where ranks hold pieces alone, the first that rank 1 has one of."""
    return "embedding.weight'" if plan == CUT else "blocks.0.up.weight'"


@pytest.mark.parametrize("plan", [*(plan for plan in PLANS if plan != "pp=2"), CUT])
def test_a_weight_of_a_shard_that_one_rank_writes_to_is_found_at_once(plan: str) -> None:
    told = _told(plan, jobs.train, "write_weight")[0]
    _assert_stopped(
        told, "CorruptionError", jobs.FAULTY_STEP, "rank 1, '" + _part(plan), "on rank(s) [1] and not on rank(s) [0"
    )


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3,whole_below=0"])
def test_a_weight_that_no_other_rank_has_is_found_where_torch_counts_no_write(plan: str) -> None:
    told = _told(plan, jobs.train, "write_data")[0]
    _assert_stopped(told, "CorruptionError", jobs.FAULTY_STEP, "rank 1, '" + _part(plan), "a fault of the memory")


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", CUT, "pp=2"])
def test_weights_that_are_clamped_on_every_rank_are_no_fault(plan: str) -> None:
    assert _told(plan, jobs.train_with_clamps, 0.1)[0]["kind"] is None


def test_a_warning_names_the_fault_and_training_goes_on() -> None:
    for told in testing.run_ranks(_warned, 2):
        assert (told["kind"], told["steps"]) == (None, 8)
        assert told["findings"]
        assert all("'blocks.0.norm.weight'" in text for text in told["findings"] if "norm.weight" in text)


def _warned() -> dict[str, Any]:
    return jobs.train("dp=2", "flip_bit", on_finding="warn")


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_another_learning_rate_is_refused_before_the_next_step(plan: str) -> None:
    told = _told(plan, jobs.train, "other_rate")[0]
    _assert_stopped(
        told, "ApplyError", jobs.FAULTY_STEP, "the learning rate of group 0", "0.01 on rank 0", "0.02 on rank 1"
    )


@pytest.mark.parametrize(
    ("fault", "word", "steps"),
    [
        ("other_betas", "'betas' of group 0", jobs.FAULTY_STEP),
        ("other_mode", "whether module 'blocks.0' trains", jobs.FAULTY_STEP),
        ("other_precision", "get_float32_matmul_precision", 3),
    ],
)
@pytest.mark.parametrize("plan", ["dp=2,zero=2", "pp=2"])
def test_other_options_are_refused_in_the_next_step_and_torchs_switches_at_a_sentinel(
    plan: str, fault: str, word: str, steps: int
) -> None:
    _assert_stopped(_told(plan, jobs.train_and_restore, fault)[0], "ApplyError", steps, word)


@pytest.mark.parametrize(
    ("which", "word"),
    [
        ("lr", "the learning rate of group 0"),
        ("betas", "the optimizer's 'betas' of group 0"),
        ("optimizer", "the optimizer's class"),
        ("max_grad_norm", "max_grad_norm="),
        ("non_finite", "non_finite="),
        ("seed", "seed="),
        ("loss", "the loss function"),
        ("closure", "the loss function"),
        ("activation", "the class of module 'blocks.1.act'"),
        ("temperature", "attribute 'temperature' of the model itself"),
        ("sentinel_every", "sentinel_every="),
        ("trainable", "whether 'embedding.weight' requires a gradient"),
    ],
)
def test_other_settings_are_refused_before_the_first_step(which: str, word: str) -> None:
    for plan in ("dp=2", "tp=2"):
        for outcome in testing.run_outcomes(setting_jobs.apply_with_others, 2, plan, which):
            assert type(outcome.error).__name__ == "ApplyError", outcome
            assert f"ranks disagree about {word}" in str(outcome.error)
            assert "on rank 0 and" in str(outcome.error)


def test_other_switches_of_torch_are_refused_before_the_first_step() -> None:
    for outcome in testing.run_outcomes(setting_jobs.apply_with_precision, 2, "dp=2"):
        assert "ranks disagree about torch.get_float32_matmul_precision()" in str(outcome.error)


# -- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,tp=2"])
def test_a_number_drawn_on_one_rank_alone_moves_no_masks_apart(plan: str) -> None:
    alone = testing.run_ranks(jobs.train_with_draws, PLANS[plan], plan, "rank 0")
    nobody = testing.run_ranks(jobs.train_with_draws, PLANS[plan], plan, "nobody")
    if plan == "tp=2":  # it goes on as where the other rank had drawn, too
        together = testing.run_ranks(jobs.train_with_draws, PLANS[plan], plan, "everyone")
        assert alone[0]["losses"] == together[0]["losses"]
    assert alone[0]["losses"] != nobody[0]["losses"]
    for told in alone:
        assert told["kind"] is None
        assert told["losses"] == alone[0]["losses"]
    for name, value in alone[0]["whole"].items():
        assert value.equal(alone[1]["whole"][name]), name
    assert [len(told["messages"]) for told in alone[:2]] == [0, 1]
    assert "on rank 1 stands elsewhere than on rank 0" in alone[1]["messages"][0]
    assert not any(told["messages"] for told in nobody)


def test_a_model_that_shares_layers_leaves_another_ones_shares_their_own_numbers() -> None:
    """Its ranks were told that they stand apart, and went on with one generator: the other model's shares had equal masks."""
    first, second = testing.run_ranks(jobs.train_beside_shares, 2)
    assert first["losses"] == second["losses"]
    assert not first["messages"]
    assert not second["messages"]
    assert not set(first["masks"]) & set(second["masks"])


def test_an_own_loop_gives_another_models_shares_their_numbers_back_after_each_forward() -> None:
    """They came back with the optimizer's step: a forward of the other model before it drew one mask for two shares."""
    first, second = testing.run_ranks(jobs.own_loop_beside_shares, 2)
    assert not set(first) & set(second)


def test_ranks_of_one_share_under_two_plans_draw_alike_between_steps() -> None:
    """A rank that had drawn once more got its generator back after each step: what a script drew later stayed apart."""
    first, second, third, fourth = testing.run_ranks(jobs.train_two_on_drawn_inputs, 4)
    assert first == second
    assert third == fourth
    assert first != third


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_inference_mode_around_an_evaluation_changes_no_number(plan: str) -> None:
    """Stages looked for writes by versions, which tensors of inference mode have not: torch's own error."""
    for evaluated, called, in_inference, called_in_inference in testing.run_ranks(
        jobs.evaluate_in_inference_mode, 2, plan
    ):
        assert in_inference == evaluated
        assert called_in_inference == called


@pytest.mark.parametrize("plan", ["single", *PLANS])
def test_evaluation_changes_nothing_that_is_drawn_later(plan: str) -> None:
    num_ranks = PLANS.get(plan, 1)
    with_evaluation = testing.run_ranks(jobs.train_with_evaluation, num_ranks, plan, True)
    without = testing.run_ranks(jobs.train_with_evaluation, num_ranks, plan, False)
    assert with_evaluation == without


# -- inspections -----------------------------------------------------------------------------------------------------


def test_inspections_take_turns_and_stop_before_the_optimizer() -> None:
    for told in testing.run_ranks(setting_jobs.train_with_inspections, 2, "dp=2", "stop", 0):
        _assert_stopped(told, "CorruptionError", 0, "step 0, rank 1, 'blocks.0'", "0.25", "1e-09")
        assert told["has_not_moved"]
    for told in testing.run_ranks(setting_jobs.train_with_inspections, 2, "dp=2", "warn", 1):
        assert (told["kind"], told["begun"], len(told["findings"])) == (None, [0, 1, 2], 1)
        assert "step 2, rank 1" in told["findings"][0]


def test_steps_between_two_sentinels_exchange_no_more_than_without() -> None:
    for plan in ("dp=2", "tp=2"):
        with_sentinels = testing.run_ranks(setting_jobs.count_exchanges, 2, plan, 3)[0]
        without = testing.run_ranks(setting_jobs.count_exchanges, 2, plan, 0)[0]
        due = [0, 3]
        for number, (many, few) in enumerate(zip(with_sentinels, without, strict=True)):
            assert (many > few) == (number in due)
            assert many == few or number in due


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _warnings_of_shares(plan: str, cuts: bool) -> list[str]:
    """Train two steps on shares, or on the whole batch on every rank; return what was warned of shares on this rank."""
    texts = _Texts()
    log = logging.getLogger("meshwright")
    log.addHandler(texts)
    try:
        with mw.apply_plan(jobs.build_net, plan, optimizer=jobs.SGD, loss_fn=jobs.losses.cross_entropy) as model:
            for number in range(2):
                batch = jobs.language(8, number)
                model.step(mw.split_batch(batch, model) if cuts else batch)
    finally:
        log.removeHandler(texts)
    return [text for text in texts.found if "same batch" in text]


@pytest.mark.parametrize(
    ("plan", "ranks"), [("dp=2", ["[0, 1]", ""]), ("dp=2,tp=2", ["[0, 2]", "[1, 3]", "", ""]), ("tp=2", ["", ""])]
)
def test_ranks_that_train_on_the_same_batch_hear_of_it_once(plan: str, ranks: list[str]) -> None:
    assert not any(testing.run_ranks(_warnings_of_shares, len(ranks), plan, True))
    told = testing.run_ranks(_warnings_of_shares, len(ranks), plan, False)
    assert [len(texts) for texts in told] == [int(bool(named)) for named in ranks]
    assert all(
        f"ranks {named} train on the same batch" in texts[0] for texts, named in zip(told, ranks, strict=True) if named
    )
