"""Pipelines are never silently wrong and never hang: what users' forwards and scripts do beside calling layers in order.

Each script trains under a plan and in a plain float64 loop. What cannot be equal is refused, on all ranks, in words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parity.jobs import loss_jobs
from tests.parity.jobs import never_wrong_pipeline_jobs as jobs
from tests.parity.jobs import pipeline_failure_jobs as failures
from tests.parity.jobs import unlike_ranks_jobs as unlike
from tests.parity.jobs.never_wrong_pipeline_reads import build_old_spectral_norm, build_swapping
from tests.parity.jobs.never_wrong_pipeline_states import WIDTH
from tests.parity.jobs.pipeline_jobs import fail_for_another_stages_way
from torch import Tensor

import meshwright as mw
from meshwright import testing

_TOLERANCE = 1e-11
_SEVERAL_STAGES = (
    "auxiliary",
    "cached",
    "own_tables",
    "hands_on",
    "identity",
    "memory",
    "own_state",
    "own_state_read_later",
    "raises_when_tried",
    "skips",
    "gradual",
    "unused_results",
    "draws_inside",
    "captured",
)


def _assert_close(got: Any, expected: Any, name: str) -> None:
    if expected is None or got is None:
        assert got is expected, name
        return
    got, expected = torch.as_tensor(got), torch.as_tensor(expected)
    scale = max(float(expected.abs().max()), 1e-300) if expected.numel() else 1.0
    assert got.shape == expected.shape, name
    assert not expected.numel() or float((got - expected).abs().max()) <= _TOLERANCE * scale, name


def _assert_equal(name: str, plan: str, run: Callable[[str, str], jobs.Record] = jobs.run_planned) -> None:
    expected = jobs.run_plain(name)
    for found in testing.run_ranks(run, mw.Plan.parse(plan).num_ranks, name, plan):
        for step, (got, loss) in enumerate(zip(found.losses, expected.losses, strict=True)):
            _assert_close(got, loss, f"loss of step {step}")
        for got, loss in zip(found.evaluations, expected.evaluations, strict=True):
            _assert_close(got, loss, "evaluation")
        for step, gradients in enumerate(expected.gradients):
            assert found.gradients[step].keys() == gradients.keys()
            for key, gradient in gradients.items():
                _assert_close(found.gradients[step][key], gradient, f"gradient of {key} in step {step}")
        for key, value in expected.state.items():
            _assert_close(found.state[key], value, key)
        assert found.attributes == expected.attributes


@pytest.mark.parametrize("name", [name for name in jobs.SCRIPTS if name not in jobs.REFUSED])
def test_equals_a_plain_loop(name: str) -> None:
    _assert_equal(name, "pp=2")


@pytest.mark.parametrize("name", _SEVERAL_STAGES)
def test_equals_a_plain_loop_with_several_stages_a_rank(name: str) -> None:
    # Every stage of a rank runs the model's own code: what that counts or averages must not move twice.
    _assert_equal(name, "pp=2,schedule=zbv")


@pytest.mark.parametrize("plan", ["tp=2", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=1"])
@pytest.mark.parametrize("name", ["replaces", "replaced_when_built"])
def test_layers_that_the_first_batch_replaces_under_other_plans(name: str, plan: str) -> None:
    _assert_equal(name, plan)


def test_they_are_refused_where_ranks_hold_parts_of_a_model_too_large_to_be_whole() -> None:
    for outcome in testing.run_outcomes(jobs.run_large, 2, "replaces", "dp=2,zero=3,whole_below=1"):
        assert "where a first forward does it: run it there, once" in str(outcome.error)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved,virtual=2"])
def test_parts_around_layers_of_other_stages_are_proven_without_their_numbers(schedule: str) -> None:
    # Without gradients the proof of a stage that only passes by failed, was remembered, and made stages take different ways.
    _assert_equal("shared_experts", f"tp=2,pp=2,schedule={schedule}", jobs.run_cut)


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_layers_write_over_results_whose_backward_is_split(schedule: str) -> None:
    _assert_equal("over_own_results", f"pp=2,schedule={schedule}")


@pytest.mark.parametrize("name", list(jobs.REFUSED))
def test_is_refused_on_all_ranks_with_a_fix(name: str) -> None:
    outcomes = testing.run_outcomes(jobs.run_planned, 2, name, "pp=2")
    assert all(isinstance(outcome.error, mw.ApplyError) for outcome in outcomes)
    assert any(jobs.REFUSED[name] in str(outcome.error) for outcome in outcomes)
    assert all("fix:" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize(
    "name",
    ["returns_half", "writes_number", "returns_enum_late", "grows_table", "marks_far", "read_by_layer"]
    + [f"writes_{way}_later" for way in ("copy", "late", "late_count")],
)
def test_other_kinds_are_refused_where_layers_are_cut(name: str) -> None:
    outcomes = testing.run_outcomes(jobs.run_planned, 4, name, "tp=2,pp=2")
    assert all(isinstance(outcome.error, mw.ApplyError) for outcome in outcomes)
    assert any(jobs.REFUSED[name] in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize("kind", ["enum", "object"])
def test_other_kinds_are_told_by_the_first_stage_where_layers_are_cut(kind: str) -> None:
    _assert_equal(f"returns_{kind}", "tp=2,pp=2")


@pytest.mark.parametrize("kind", ["python", "torch"])
def test_layers_left_out_by_chance_after_training_began(kind: str) -> None:
    # Each rank has another state of Python's generator; the stages decide alike all the same.
    first, *others = testing.run_ranks(jobs.run_chance, 2, "pp=2", kind)
    assert all(math.isfinite(loss) for loss in first)
    assert all(losses == first for losses in others)


def test_draws_that_the_first_look_has_not_seen() -> None:
    # An evaluation comes first, in which nothing is drawn between the layers.
    first, *others = testing.run_ranks(jobs.run_late_chance, 2, "pp=2")
    assert all(losses == first for losses in others)


@pytest.mark.parametrize("empty_rank", [0, 1])
def test_ranks_with_unequal_shares_are_refused(empty_rank: int) -> None:
    outcomes = testing.run_outcomes(unlike.step_with_an_empty_share, 2, empty_rank)
    assert all("an empty share" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize("plan", ["pp=2", "tp=2"])
@pytest.mark.parametrize("starts", ["step", "evaluate", "forward"])
def test_a_layer_that_is_replaced_before_the_first_batch_is_refused(plan: str, starts: str) -> None:
    for on_one_rank in (False, True):
        job = functools.partial(unlike.replace_before_the_first_batch, on_one_rank=on_one_rank)
        outcomes = testing.run_outcomes(job, 2, plan, starts)
        assert all(isinstance(outcome.error, mw.ApplyError) for outcome in outcomes)
        assert all("'blocks.1.0'" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize("plan", ["pp=2", "tp=2"])
def test_a_forward_may_come_before_the_first_step(plan: str) -> None:
    expected = unlike.run_plain_losses(2)
    for losses in testing.run_ranks(unlike.step_after_a_forward, 2, plan):
        torch.testing.assert_close(losses, expected, rtol=1e-11, atol=0)


def test_stages_that_take_different_ways_say_so() -> None:
    outcomes = testing.run_outcomes(unlike.step_in_different_ways, 2)
    assert all("took different paths" in str(outcome.error) for outcome in outcomes)


def test_what_a_layer_raises_over_a_tensor_of_another_way_is_laid_to_the_way() -> None:
    outcomes = testing.run_outcomes(fail_for_another_stages_way, 2)
    assert all(isinstance(outcome.error, mw.ApplyError) for outcome in outcomes)
    assert all("took different paths" in str(outcome.error) for outcome in outcomes)


def test_an_error_of_one_stage_is_told_to_the_others_and_training_goes_on() -> None:
    for losses in testing.run_ranks(unlike.step_after_an_error, 2):
        assert losses[0] in ("ValueError: boom", "rank 1 cannot go on: ValueError: boom")
        assert [type(loss) for loss in losses[1:]] == [float, float]


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize(
    ("plan", "where", "action"),
    [
        ("pp=2", "backward", "step"),
        ("pp=2,schedule=zb-h1", "backward", "step"),
        ("pp=2,schedule=zbv", "backward", "step"),
        ("pp=2,schedule=zbv", "forward", "step"),
        ("pp=2", "forward", "evaluate"),
        ("pp=2", "forward", "forward"),
        ("pp=2,schedule=zbv", "forward", "forward"),
    ],
)
def test_a_layer_that_raises_is_told_to_all_ranks_and_training_goes_on(
    plan: str, where: str, action: str, place: int
) -> None:
    first, *others = testing.run_ranks(failures.run_with_a_failure, 2, plan, place, where, action)
    assert "boom" in first[1]
    assert all("boom" in found[1] for found in others)
    assert all((found[0], found[2]) == (first[0], first[2]) for found in others)


def test_a_hook_on_one_rank_changes_nothing() -> None:
    (losses, count), (others, none) = testing.run_ranks(unlike.step_with_a_hook_on_one_rank, 2)
    assert losses == others
    assert count > 0
    assert none == 0


def test_a_backward_hook_around_several_stages_is_refused() -> None:
    outcomes = testing.run_outcomes(unlike.step_with_a_backward_hook, 2, "pp=2", False)
    assert all(isinstance(outcome.error, mw.ApplyError) for outcome in outcomes)
    assert all("backward hook" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,schedule=zbv"])
def test_a_backward_hook_of_a_layer_changes_what_it_changes_on_one_device(plan: str) -> None:
    expected = unlike.plain_norm_with_a_backward_hook()
    for norm in testing.run_ranks(unlike.step_with_a_backward_hook, 2, plan, True):
        _assert_close(norm, expected, "norm")


def test_an_inspection_finds_a_wrong_input_of_a_stage() -> None:
    for parts, findings in testing.run_ranks(unlike.inspect_with_a_fault, 2):
        assert "boundary of stage 1" in parts
        assert all(part == "boundary of stage 1" for part in findings)
    assert sum(len(findings) for _, findings in testing.run_ranks(unlike.inspect_with_a_fault, 2)) == 1


def test_an_average_that_was_made_before_the_cut_is_refused() -> None:
    outcomes = testing.run_outcomes(unlike.step_with_an_early_average, 2)
    assert all("whole_parameters" in str(outcome.error) for outcome in outcomes)


def test_the_scripts_do_what_they_are_for() -> None:
    # A script whose forward ignored what it is about would be equal under any plan.
    losses = jobs.run_plain("own_state").losses
    assert len(set(losses)) == len(losses)
    gradients: dict[str, Tensor | None] = jobs.run_plain("gradual").gradients[0]
    assert gradients["blocks.0.0.weight"] is None


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_of_what_has_no_gradient_gives_none() -> None:
    # torch warns, and trains the head alone; stages that checkpoint their layers by themselves trained all.
    build = functools.partial(loss_jobs.build_checkpointed, use_reentrant=True, has_stem=False)
    batches = [loss_jobs.pairs(6, seed) for seed in range(2)]
    expected = testing.oracle_steps(build, batches, loss_jobs.mean_square)
    assert expected[0].gradients["block.0.weight"] is None
    plan = mw.Plan.parse("pp=2,micro_batches=2")
    for records in testing.run_ranks(testing.plan_steps, 2, build, plan, batches, loss_jobs.mean_square):
        testing.assert_parity(records, expected)


@pytest.mark.parametrize("name", ["installs", "installs_idly"])
def test_hooks_of_a_first_forward_are_kept_beside_cut_layers(name: str) -> None:
    """The layers were looked at on a copy alone, whose flag the stages did not have: refused."""
    _assert_equal(name, "tp=2,pp=2", jobs.run_cut)


@pytest.mark.parametrize("plan", ["pp=2", "tp=2,pp=2"])
def test_spectral_norm_of_old_is_computed_by_its_layers_stage(plan: str) -> None:
    """The other stages refused the write into its vectors, by a weight that they do not hold."""
    batches = [(torch.randn(6, WIDTH).double(), torch.randn(6, WIDTH).double()) for _ in range(3)]
    expected = testing.oracle_steps(build_old_spectral_norm, batches, loss_jobs.mean_square)
    parsed = mw.Plan.parse(plan)
    steps = (build_old_spectral_norm, parsed, batches, loss_jobs.mean_square)
    for records in testing.run_ranks(testing.plan_steps, parsed.num_ranks, *steps):
        testing.assert_parity(records, expected)


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,micro_batches=2"])
def test_the_first_step_is_one_of_the_model_that_was_given(plan: str) -> None:
    """The look at the forward left the layer's new child behind, which the first step used (the second one is refused)."""
    batches = [(torch.randn(6, WIDTH).double(), torch.randn(6, WIDTH).double())]
    expected = testing.oracle_steps(build_swapping, batches, loss_jobs.mean_square)
    steps = (build_swapping, mw.Plan.parse(plan), batches, loss_jobs.mean_square)
    for records in testing.run_ranks(testing.plan_steps, 2, *steps):
        assert records[0].loss == pytest.approx(expected[0].loss, rel=1e-12)
