"""What a script may do between two steps and beside them, under data parallelism and ZeRO: equal, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity.jobs import assigning_jobs as assigning
from tests.parity.jobs import never_wrong_data_jobs as jobs
from tests.parity.jobs import never_wrong_iterators as iterators
from tests.parity.jobs import never_wrong_replica_jobs as replica_jobs
from tests.parity.jobs import own_gradient_jobs as gradient_jobs
from tests.parity.jobs import rank_data_jobs as rank_jobs

import meshwright as mw
from meshwright import testing

ZERO3 = "dp=2,zero=3,whole_below=1"


def refused(function: Any, num_ranks: int, *args: Any, word: str) -> None:
    for rank, outcome in enumerate(testing.run_outcomes(function, num_ranks, *args)):
        assert isinstance(outcome.error, mw.ApplyError), f"rank {rank}: {outcome.error!r} {outcome.result!r}"
        assert word in str(outcome.error), f"rank {rank}: {outcome.error}"


def equal(found: Any, expected: Any) -> None:
    losses, state = found
    expected_losses, expected_state = expected
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-13)


def equal_on_ranks(plan: str, change: Any, **options: Any) -> None:
    per_rank = testing.run_ranks(functools.partial(jobs.planned, jobs.build_net, plan, change, **options), 2)
    expected = jobs.plain(jobs.build_net, change, **options)
    for found in per_rank:
        equal(found, expected)


# -- own loops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", ZERO3, "tp=2", "pp=2"])
def test_backward_and_optimizer_of_the_scripts_own_are_refused(plan: str) -> None:
    word = {"pp=2": "outputs come without a graph", ZERO3: "model.backward()"}.get(
        plan, "a backward of the script's own"
    )
    refused(jobs.own_loop, 2, plan, word=word)
    refused(jobs.step_alone, 2, plan, word="outside of model.step()")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "tp=2"])
@pytest.mark.parametrize("way", list(gradient_jobs.OWN_GRADIENTS))
def test_gradients_that_nobody_exchanges_are_refused_where_they_arrive(plan: str, way: str) -> None:
    # What takes a part itself is refused before.
    taken = "needs the whole tensor" if plan == "tp=2" else "a backward of the script's own"
    words = {"inner_step_by_func": "in the place of its parameter", "penalty": taken, "inner_step": taken}
    word = words.get(way, "a backward of the script's own")
    refused(gradient_jobs.own_gradients, 2, plan, way, word=word)


@pytest.mark.parametrize("own", [False, True])
def test_a_loss_that_trains_parameters_of_no_model_is_refused(own: bool) -> None:
    refused(jobs.foreign_head, 2, "dp=2", own, word="that is in no model under a plan")
    assert testing.run_ranks(jobs.foreign_head, 2, "tp=2", False) == [True, True]


def test_the_last_stage_alone_may_not_train_a_parameter_of_no_model() -> None:
    refused(jobs.foreign_head, 2, "pp=2,micro_batches=2", False, word="that is in no model under a plan")


def test_replicas_refuse_an_own_loop_too() -> None:
    with pytest.raises(mw.ApplyError, match="outside of model"):
        jobs.step_alone("data_parallel,dp=2")


@pytest.mark.parametrize("of_module", [False, True])
def test_accumulation_by_hand_is_refused(of_module: bool) -> None:
    refused(jobs.accumulate, 2, "dp=2", of_module, word="micro_batches=2")


def test_one_process_steps_by_hand_and_so_does_a_closed_model() -> None:
    jobs.own_loop("single")
    jobs.accumulate("single", False)
    assert testing.run_ranks(jobs.after_closing, 2, "dp=2") == [True, True]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", ZERO3])
def test_learning_rate_schedulers(plan: str) -> None:
    found = testing.run_ranks(jobs.planned, 2, jobs.build_net, plan, jobs.Scheduled())
    for part in found:
        equal(part, jobs.plain(jobs.build_net, jobs.Scheduled()))


# -- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp=2,zero=1", ZERO3, "pp=2"])
def test_optimizers_that_couple_parameters_are_refused(plan: str) -> None:
    refused(
        jobs.planned, 2, jobs.build_net, plan, jobs.no_change, jobs.GlobalNorm, word="GlobalNorm updates two parameters"
    )


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_optimizers_that_couple_parameters_are_right_where_all_are_here(plan: str) -> None:
    equal_on_ranks(plan, jobs.no_change, optimizer=jobs.GlobalNorm)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", ZERO3])
def test_every_group_of_an_optimizer_is_tried(plan: str) -> None:
    equal_on_ranks(plan, jobs.no_change, optimizer=jobs.hybrid)


def test_a_group_that_is_added_is_refused_where_parameters_are_dealt_out() -> None:
    refused(jobs.planned, 2, jobs.build_net, "pp=2", jobs.add_group, jobs.head_alone, word="groups of SGD were changed")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", ZERO3, "tp=2"])
def test_a_group_that_is_added_is_trained(plan: str) -> None:
    equal_on_ranks(plan, jobs.add_group, optimizer=jobs.head_alone)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", ZERO3])
def test_the_state_of_an_optimizer_is_loaded(plan: str) -> None:
    equal_on_ranks(plan, jobs.reload_optimizer)


def test_an_optimizers_state_of_other_pieces_is_refused() -> None:
    refused(
        jobs.planned, 2, jobs.build_net, "dp=2,zero=1", jobs.load_whole_state, word="another plan or by another rank"
    )


# -- values between steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [jobs.assign_vector, jobs.tie_later])
@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2"])
def test_values_that_are_put_elsewhere_are_refused(plan: str, change: Any) -> None:
    is_read_first = plan == "tp=2" and change is jobs.assign_vector  # as a vector, of which this rank has a part
    word = "needs the whole tensor" if is_read_first else "were put elsewhere"
    refused(jobs.planned, 2, jobs.build_net, plan, change, word=word)


@pytest.mark.parametrize("change", [jobs.assign_data, jobs.assign_vector])
def test_values_that_are_put_elsewhere_are_trained_where_nothing_is_cut(change: Any) -> None:
    equal_on_ranks("dp=2", change)


def test_new_values_in_memory_of_their_own_are_taken_back() -> None:
    equal_on_ranks("dp=2,zero=1", jobs.assign_data)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", ZERO3, "tp=2", "pp=2"])
def test_a_forward_assigns_to_its_parameters(plan: str) -> None:
    options = {"optimizer": assigning.trainable_sgd}
    run = functools.partial(jobs.planned, assigning.build_constrained, plan, **options)
    expected = jobs.plain(assigning.build_constrained, **options)
    for found in testing.run_ranks(run, 2):
        equal(found, expected)


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,tp=2,zero=1"])
def test_a_forward_that_shrinks_its_weights_does_so_once_a_step(plan: str) -> None:
    """The trials of a cut model put parameters back; single is the reference, since it draws the same."""
    run = functools.partial(jobs.planned, assigning.build_decaying)
    (expected,) = testing.run_ranks(run, 1, "single")
    for found in testing.run_ranks(run, 4 if "dp" in plan else 2, plan):
        equal(found, expected)


@pytest.mark.parametrize("way", ["assigned", "in_place"])
@pytest.mark.parametrize("plan", ["dp=2,zero=1", ZERO3, "tp=2", "pp=2"])
def test_a_forward_that_begins_to_write_later(plan: str, way: str) -> None:
    """Equal, or refused where the values that a call sees are put together for it alone; they were lost without a word."""
    build = functools.partial(assigning.build_late, way)
    expected = jobs.plain(build, num_steps=5)
    for outcome in testing.run_outcomes(functools.partial(jobs.planned, build, plan, num_steps=5), 2):
        if plan == ZERO3 or (plan, way) == ("tp=2", "assigned"):
            assert isinstance(outcome.error, mw.ApplyError)
            assert "the write would be lost" in str(outcome.error) or "was written over" in str(outcome.error)
        else:  # a clamp of shards is that of the whole
            equal(outcome.result, expected)


@pytest.mark.parametrize("plan", ["dp=2,micro_batches=2", "dp=2,zero=1,micro_batches=2", "pp=2,micro_batches=2"])
def test_a_parameter_that_each_micro_batch_moves_is_told(plan: str) -> None:
    for reasons in testing.run_ranks(assigning.reasons_of, 2, plan):
        told = [reason for reason in reasons if "the forward of each micro-batch changes" in reason]
        assert len(told) == 1
        assert "parameter 'layers.1.vector'" in told[0]
        assert "weight" not in told[0]  # a clamp gives the same again


@pytest.mark.parametrize("plan", ["dp=2,micro_batches=2", "pp=2,micro_batches=2"])
def test_a_count_that_each_micro_batch_moves_is_refused_or_told(plan: str) -> None:
    for outcome in testing.run_outcomes(assigning.reasons_of, 2, plan, assigning.build_decayed):
        if outcome.error is not None:
            assert isinstance(outcome.error, mw.ApplyError)
            assert "_Shrunk.calls" in str(outcome.error)
        else:
            assert any("attribute 'layers.1.calls'" in reason for reason in outcome.result)


@pytest.mark.parametrize(
    "plan", ["dp=2,tp=2,micro_batches=1", "dp=2,pp=2,micro_batches=1", "dp=2,tp=2,zero=1,micro_batches=1"]
)
def test_trials_of_ranks_together_put_parameters_back(plan: str) -> None:
    """They were left as the trials had made them: the loss was refused as none of the samples."""
    expected = jobs.plain(assigning.build_decayed, num_steps=5)
    for found in testing.run_ranks(functools.partial(jobs.planned, assigning.build_decayed, plan, num_steps=5), 4):
        equal(found, expected)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=2", "tp=2", "pp=2"])
def test_parameters_in_one_memory_are_refused(plan: str) -> None:
    refused(jobs.planned, 2, jobs.build_tied_by_data, plan, word="share their memory")


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2", "pp=2"])
def test_a_parameter_among_the_buffers_is_refused(plan: str) -> None:
    refused(jobs.planned, 2, jobs.build_with_a_parameter_among_the_buffers, plan, word="is the memory of parameter")


def test_a_parameter_among_the_buffers_is_refused_where_each_replica_has_its_own() -> None:
    plan = mw.Plan.parse("data_parallel", num_devices=2)
    with pytest.raises(mw.ApplyError, match="is the memory of parameter"):
        mw.apply_plan(jobs.build_with_a_parameter_among_the_buffers, plan, loss_fn=jobs.square, devices=["cpu", "cpu"])


def test_parameters_in_one_memory_are_as_on_one_device_where_nothing_is_cut() -> None:
    for found in testing.run_ranks(jobs.planned, 2, jobs.build_tied_by_data, "dp=2"):
        equal(found, jobs.plain(jobs.build_tied_by_data))


@pytest.mark.parametrize("change", [jobs.clamp, jobs.load_state])
@pytest.mark.parametrize(
    "plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=1,offload=optimizer", "dp=2,zero=2,offload=optimizer"]
)
def test_values_written_in_place_are_trained(plan: str, change: Any) -> None:
    equal_on_ranks(plan, change)


@pytest.mark.parametrize("plan", [ZERO3, "tp=2", "pp=2"])
def test_a_state_is_not_loaded_into_parts(plan: str) -> None:
    refused(jobs.planned, 2, jobs.build_net, plan, jobs.load_state, word="load_state_dict()")
    refused(jobs.planned, 2, jobs.build_net, plan, jobs.read_state, word="state_dict()")
    refused(jobs.planned, 2, jobs.build_net, plan, jobs.copy_it, word="copy")


@pytest.mark.parametrize("plan", [ZERO3, f"{ZERO3},offload=optimizer", "dp=2,zero=1"])
def test_a_state_is_loaded_into_whole_values(plan: str) -> None:
    equal_on_ranks(plan, jobs.load_state_inside)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", ZERO3])
def test_copies_and_averages(plan: str) -> None:
    averaged = jobs.Averaged()
    jobs.plain(jobs.build_net, averaged)
    for found in testing.run_ranks(jobs.average, 2, plan):
        torch.testing.assert_close(found, averaged.outputs(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", ZERO3, "tp=2", "pp=2"])
def test_averages_that_began_before_the_first_batch(plan: str) -> None:
    expected = jobs.plain_average()
    for found in testing.run_ranks(jobs.average_early, 2, plan):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("change", "word"),
    [(jobs.replace, "'out'"), (jobs.replace_in_list, "'mid.1'"), (jobs.swap, "'mid."), (jobs.delete, "children")],
)
@pytest.mark.parametrize("plan", ["dp=2", ZERO3])
def test_modules_that_are_replaced_are_refused(plan: str, change: Any, word: str) -> None:
    refused(jobs.planned, 2, jobs.build_net, plan, change, word=word)


# -- what a rank's own data decides --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [ZERO3, f"{ZERO3},micro_batches=2"])
def test_layers_that_run_again_on_one_rank(plan: str) -> None:
    for losses in testing.run_ranks(rank_jobs.looped, 2, plan):
        assert losses == pytest.approx(rank_jobs.plain_loops(), rel=1e-12)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2"])
def test_buffers_as_long_as_a_ranks_batch(plan: str) -> None:
    first, second = testing.run_ranks(rank_jobs.cached, 2, plan, False)
    assert torch.equal(first, second)
    refused(rank_jobs.cached, 2, plan, True, word="buffer 'cache'")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2"])
def test_a_hook_on_one_rank(plan: str) -> None:
    for losses in testing.run_ranks(rank_jobs.hook_on_one_rank, 2, plan):
        assert losses == pytest.approx(jobs.plain(jobs.build_net)[0], rel=1e-12)


def test_a_hook_on_one_rank_that_takes_a_gradient_away() -> None:
    refused(rank_jobs.taken_on_one_rank, 2, "dp=2", word="'out.bias' away on rank 1")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", ZERO3, "tp=2", "pp=2"])
def test_a_loss_without_a_graph_is_refused(plan: str) -> None:
    refused(jobs.planned, 2, jobs.build_net, plan, jobs.no_change, jobs.Sgd, rank_jobs.detached, word="has a graph")


def test_a_loss_without_a_graph_is_refused_in_one_process() -> None:
    with pytest.raises(mw.ApplyError, match="has a graph"):
        jobs.planned(jobs.build_net, "single", loss_fn=rank_jobs.detached)


@pytest.mark.parametrize("plan", [ZERO3, f"{ZERO3},recompute=full"])
def test_a_penalty_over_all_parameters(plan: str) -> None:
    expected = rank_jobs.penalised(None)
    for found in testing.run_ranks(rank_jobs.penalised, 2, plan):
        equal(found, expected)


def test_parameters_that_were_put_aside_are_named_as_a_cause() -> None:
    for outcome in testing.run_outcomes(rank_jobs.put_aside, 2, ZERO3):
        assert isinstance(outcome.error, mw.NonFiniteError)
        assert "look parameters up through the module" in str(outcome.error)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", ZERO3])
def test_a_forward_that_changes_a_dtype_is_refused(plan: str) -> None:
    refused(jobs.planned, 2, rank_jobs.build_recasts, plan, word="'router.")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "pp=2,micro_batches=2", "tp=2,micro_batches=2"])
@pytest.mark.parametrize(("option", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True)])
def test_embeddings_that_look_at_the_whole_batch_are_refused(plan: str, option: str, value: Any) -> None:
    build = functools.partial(rank_jobs.build_embedding, **{option: value})
    refused(jobs.planned, 2, build, plan, word=option)


# -- replicas in threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data_parallel,dp=2", "data_parallel,dp=3"])
def test_replicas_take_over_attributes_and_give_them_back(plan: str) -> None:
    losses, state, seen = replica_jobs.annealed(plan)
    expected, expected_state, expected_seen = replica_jobs.annealed(None)
    equal((losses, state), (expected, expected_state))
    assert seen == expected_seen == [0, 1, 2, 3, True]


@pytest.mark.parametrize("kind", replica_jobs.SCALES)
@pytest.mark.parametrize("plan", ["data_parallel,dp=1", "data_parallel,dp=2"])
def test_replicas_follow_what_a_script_changes_in_objects_of_its_own(plan: str, kind: str) -> None:
    losses, state, *seen = replica_jobs.scheduled(plan, kind)
    expected, expected_state, *expected_seen = replica_jobs.scheduled(None, kind)
    equal((losses, state), (expected, expected_state))
    assert seen == expected_seen


# -- recompute -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("plan", ["dp=2,micro_batches=2", ZERO3, "pp=2,micro_batches=2"])
def test_recompute_changes_no_bit_of_values_buffers_and_counters(plan: str, kind: str) -> None:
    without = testing.run_ranks(replica_jobs.normed, 2, plan)
    for found, expected in zip(
        testing.run_ranks(replica_jobs.normed, 2, f"{plan},recompute={kind}"), without, strict=True
    ):
        assert found[:2] == expected[:2]
        assert all(torch.equal(value, other) for value, other in zip(found[2], expected[2], strict=True))


# -- iterators on modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", iterators.ITERATORS)
@pytest.mark.parametrize("plan", ["dp=2", "pp=2", "tp=2", "data_parallel,dp=2"])
def test_iterators_that_cannot_be_wound_back_are_refused(plan: str, kind: str) -> None:
    num_ranks = 1 if plan.startswith("data_parallel") else 2
    refused(jobs.planned, num_ranks, iterators.builder(kind), plan, word="cannot be rewound")


@pytest.mark.parametrize("kind", iterators.KEPT)
@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_iterators_that_can_be_wound_back_are_advanced_once_a_step(plan: str, kind: str) -> None:
    expected = jobs.plain(iterators.builder(kind))
    for found in testing.run_ranks(jobs.planned, 2, iterators.builder(kind), plan):
        equal(found, expected)
