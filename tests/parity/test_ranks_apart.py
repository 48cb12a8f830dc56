"""What a script does on one rank alone: refused in the next step by name, or told where it may be harmless."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.parity.jobs import apart_jobs as jobs
from tests.parity.jobs import inside_jobs

import meshwright as mw
from meshwright import testing

OPTIONS = ("weight_decay", "betas", "maximize")


def _same(function: Any, *args: Any) -> dict[str, Any]:
    """Run on two ranks; both must have said the same."""
    first, other = testing.run_ranks(function, 2, *args)
    assert (first["kind"], first["text"]) == (other["kind"], other["text"])
    return first


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_the_optimizer_that_one_rank_changes_is_refused(plan: str, option: str) -> None:
    told = _same(jobs.train, plan, option)
    assert told["kind"] == "ApplyError"
    assert f"ranks disagree about the optimizer's '{option}' of group 0" in told["text"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("default dtype", "torch's default dtype: it is torch.float32 on rank 0 and torch.float64 on rank 1"),
        ("no gradients", "gradients on on rank 0 and None, gradients off on rank 1"),
        ("mode", "whether module 'blocks.1.drop' trains: it is True on rank 0 and False on rank 1"),
        ("rate", "attribute 'p' of module 'blocks.0.drop': it is 0.1 on rank 0 and 0.7 on rank 1"),
        ("epsilon", "attribute 'eps' of module 'blocks.1.norm'"),
    ],
)
def test_a_setting_of_a_layer_that_one_rank_changes_is_refused(plan: str, act: str, words: str) -> None:
    told = _same(jobs.train, plan, act)
    assert told["kind"] == "ApplyError"
    assert words in told["text"]


def test_copies_that_come_apart_are_found_in_the_next_step_or_evaluation() -> None:
    assert "of which they are copies" in _same(jobs.train, "dp=2", "data")["text"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_a_state_that_one_rank_clears_is_found(plan: str) -> None:
    told = _same(jobs.train, plan, "cleared")
    assert told["kind"] == "CorruptionError"
    assert "'the optimizer's state': it was written to on rank(s) [1] and not on rank(s) [0]" in told["text"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2"])
@pytest.mark.parametrize("act", ["moments", "new moments"])
def test_a_state_that_one_rank_writes_is_found(plan: str, act: str) -> None:
    told = _same(jobs.train, plan, act)
    assert told["kind"] == "CorruptionError"
    assert "exp_avg" in told["text"]
    assert "it was written to on rank(s) [1] and not on rank(s) [0]" in told["text"]


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_one_entry_of_it_is_found(plan: str) -> None:
    text = _same(jobs.train, plan, "first moment")["text"]
    assert "(the optimizer's exp_avg)': it was written to on rank(s) [1] and not on rank(s) [0]" in text


def test_states_that_ranks_write_with_other_values_are_refused() -> None:
    told = _same(jobs.train, "dp=2", "moments by rank", jobs.Net, True)
    assert told["kind"] == "ApplyError"
    assert "(the optimizer's exp_avg)" in told["text"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=3,zero=2", "dp=2,zero=3", "tp=2"])
@pytest.mark.parametrize("act", ["moments", "new moments", "cleared"])
def test_a_state_that_every_rank_writes_is_taken(plan: str, act: str) -> None:
    for told in testing.run_ranks(jobs.train, mw.Plan.parse(plan).num_ranks, plan, act, jobs.Net, True):
        assert told["kind"] is None
        assert told["findings"] == []


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("scale", "attribute 'scale' of the model itself"),
        ("hook", "other hooks"),
        ("layer hook", "other hooks"),
        ("hook of all", "other hooks"),
    ],
)
def test_hooks_and_attributes_of_the_users_classes_are_told_once(plan: str, act: str, words: str) -> None:
    told = _same(jobs.train, plan, act)
    assert told["kind"] is None
    assert len(told["findings"]) == 1
    assert words in told["findings"][0]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "pp=2"])
@pytest.mark.parametrize("act", ["hook", "layer hook", "hook of all"])
def test_hooks_that_one_rank_registers_before_the_first_step_are_told_once(plan: str, act: str) -> None:
    told = _same(jobs.train, plan, act, jobs.Net, False, 0)
    assert told["kind"] is None
    assert ["other hooks" in text for text in told["findings"]] == [True]


# A layer with a hook is proven again, on the rank that has the hook: the error was the transport's own, in bytes.
@pytest.mark.parametrize("act", ["layer hook", "hook of all"])
def test_a_hook_of_one_rank_on_a_cut_layer_parts_the_ranks_by_name(act: str) -> None:
    for told in testing.run_ranks(jobs.train, 2, "tp=2", act):  # each names its own place first
        assert told["kind"] == "ApplyError"
        assert "ranks have gone different ways in model.step" in told["text"]


# Each rank took the other's messages for its own call's: a TypeError on one, a ValueError on the other.
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_a_rank_that_runs_the_model_alone_before_the_first_step_is_named(plan: str) -> None:
    told = _same(jobs.train, plan, "forward", jobs.Net, False, 0)
    assert told["kind"] == "ApplyError"
    assert "ranks are in different calls: rank 0 in model.step" in told["text"]
    assert "; rank 1 in model(...)" in told["text"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_what_one_rank_freezes_before_the_first_step_is_refused(plan: str) -> None:
    told = _same(jobs.train, plan, "frozen", jobs.Net, False, 0)
    assert told["kind"] == "ApplyError"
    assert "requires_grad of 'head.bias' was switched on rank(s) [1] and not on the others of 2" in told["text"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
@pytest.mark.parametrize("step", [0, 2])
def test_other_parameters_that_each_rank_freezes_are_refused(plan: str, step: int) -> None:
    told = _same(jobs.train, plan, "frozen apart", jobs.Net, True, step)
    assert told["kind"] == "ApplyError"
    assert (
        "requires_grad of 'blocks.0.up.bias' was switched on some ranks of 2 only: it is True on rank(s) [1]"
        in told["text"]
    )


# A hook on every rank of a pipeline was told as another one on each: stages have other numbers of parameters.
@pytest.mark.parametrize(
    ("plan", "act"),
    [
        *(
            ("dp=2", a)
            for a in ["nothing", "rate", "mode", "weight_decay", "scale", "hook", "data", "cleared", "frozen"]
        ),
        ("pp=2", "layer hook"),
    ],
)
def test_what_every_rank_does_is_no_difference(plan: str, act: str) -> None:
    told = _same(jobs.train, plan, act, jobs.Net, True)
    assert (told["kind"], told["findings"], told["logged"]) == (None, [], [])


@pytest.mark.parametrize(
    "plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2", "pp=2,recompute=full"]
)
def test_a_note_of_a_share_is_no_setting(plan: str) -> None:
    told = _same(jobs.train, plan, "nothing", jobs.Net if "pp" in plan else jobs.Noting)  # pp refuses to read a value
    assert (told["kind"], told["findings"]) == (None, [])


@pytest.mark.parametrize(
    ("act", "words"),
    [("key", "{factor: float, x: float64, 2 dims}, int64, 1 dims) and ({x:"), ("type", "int, x"), ("flag", "True, x")],
)
def test_another_key_flag_or_type_in_one_share_is_told_once(act: str, words: str) -> None:
    found = _same(jobs.other_forms, "dp=2", act)["findings"]
    assert [words in text for text in found] == [True]


@pytest.mark.parametrize("act", ["number", "empty"])
def test_shares_of_one_form_and_empty_ones_are_no_difference(act: str) -> None:
    assert _same(jobs.other_forms, "dp=2", act)["findings"] == []


@pytest.mark.parametrize("act", ["rate", "mode", "weight_decay"])
def test_own_loops_compare_settings_that_are_set_before_a_forward(act: str) -> None:
    told = _same(jobs.own_loop, "dp=2", act)
    assert told["kind"] == "ApplyError"
    assert "ranks disagree about" in told["text"]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("loss", "have other losses of it"),
        ("weight", "have other losses of it"),
        ("gradient", "has written the gradient of 'head.weight' on rank 1"),
        ("flag", "['factor'] is 1.0 and 2.0"),
    ],
)
def test_ranks_that_share_layers_have_one_loss_one_gradient_and_one_batch(act: str, words: str) -> None:
    told = _same(jobs.own_loop, "tp=2", act)
    assert told["kind"] == "ApplyError"
    assert words in told["text"]


def test_ranks_of_a_batch_may_have_losses_and_weights_of_their_own() -> None:
    for act in ("loss", "weight", "nothing"):
        assert _same(jobs.own_loop, "dp=2", act, jobs.Noting)["kind"] is None
    assert _same(jobs.own_loop, "tp=2", "nothing", jobs.Noting)["kind"] is None


INSIDES = {
    "object": "attribute 'scale' of attribute 'options' of the model itself was changed between steps: it is 1.0 on rank 0",
    "list": "attribute 'rates' of attribute 'options' of the model itself",
    "dict": "entry 'scale' of attribute 'table' of the model itself",
    "namespace": "attribute 'scale' of attribute 'space' of the model itself",
    "replaced": "attribute 'options' of the model itself",
    "class": "variable Reading.gain was changed between steps: it is 1.0 on rank 0 and 3.0 on rank 1",
    "global": "variable FACTOR",
    "entry of a global": "entry 'factor' of variable TABLE",
    "deep entry": "entry 'factor' of entry 'deep' of variable TABLE",
    "loss": "attribute 'weight' of the loss function",
    "closure": "entry 'weight' of variable kept",
}


@pytest.mark.parametrize(
    ("plan", "act"),
    [("dp=2", act) for act in INSIDES]
    + [(plan, act) for plan in ("dp=2,zero=3,whole_below=0", "pp=2") for act in ("deep entry", "object", "loss")],
)
def test_what_one_rank_alone_changes_inside_of_objects_and_variables_is_told_once(plan: str, act: str) -> None:
    told = _same(inside_jobs.train, plan, act)
    assert told["kind"] is None
    assert [INSIDES[act] in finding for finding in told["findings"]] == [True]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=0", "tp=2", "pp=2"])
def test_what_one_rank_alone_changes_before_the_first_step_is_refused_or_told(plan: str) -> None:
    refused = _same(functools.partial(jobs.train, faulty_step=0), plan, "epsilon")
    assert refused["kind"] == "ApplyError"
    assert "attribute 'eps' of module 'blocks.1.norm'" in refused["text"]
    refused = _same(functools.partial(jobs.train, faulty_step=0), plan, "default dtype")
    assert "torch's default dtype: it is torch.float32 on rank 0" in refused["text"]
    told = _same(functools.partial(jobs.train, faulty_step=0), plan, "nothing")
    assert (told["kind"], told["findings"]) == (None, [])
    if plan != "tp=2":  # there the loss of the first step is another one on each rank
        told = _same(functools.partial(inside_jobs.train, faulty_step=0), plan, "dict")
        assert [INSIDES["dict"] in finding for finding in told["findings"]] == [True]


@pytest.mark.parametrize("act", ["dict", "global"])
def test_own_loops_compare_what_is_changed_inside(act: str) -> None:
    told = _same(functools.partial(inside_jobs.train, own_loop=True), "dp=2", act)
    assert told["kind"] is None


@pytest.mark.parametrize("act", [*INSIDES, "same", "nothing"])
def test_what_every_rank_changes_inside_is_no_difference(act: str) -> None:
    told = _same(inside_jobs.train, "dp=2", act, True)
    assert (told["kind"], told["findings"]) == (None, [])
    if act == "same":
        assert _same(inside_jobs.train, "dp=2", act)["findings"] == []


def test_a_log_in_what_code_reads_is_told_a_few_times_alone() -> None:
    assert testing.run_ranks(inside_jobs.growing, 2, 40) == [20, 20]


# Trials of a first batch came before batches were compared: raw errors of torch, or of an exchange of other sizes.
@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
@pytest.mark.parametrize("act", list(jobs.FIRST))
def test_another_form_of_the_first_batch_on_one_rank_is_refused_by_name(plan: str, act: str) -> None:
    told = _same(jobs.first_form, plan, act)
    assert told["kind"] == "ApplyError"
    assert "ranks [0, 1] share the model's layers and must step on the same share of the batch" in told["text"]


def test_a_parameter_that_one_rank_deletes_is_named_and_the_plan_can_be_read_after_it() -> None:
    for told in testing.run_ranks(jobs.deleted, 2, "tp=2"):
        assert told["kind"] == "ApplyError"
        assert "'blocks.0.up.bias' was" in told["text"]
        assert told["plan"] == "tp=2"
