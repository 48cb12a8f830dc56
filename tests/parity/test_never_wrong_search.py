"""What the first call, mode, block or batch does not show: it is proven as well, or stays whole with a reason."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity.jobs import search_jobs
from tests.parity.models import search_models
from tests.scopes import FULL_GRID
from tests.tolerances import FLOAT64
from torch import nn

from meshwright import testing
from meshwright.apply.tensor.search import candidates as ways
from meshwright.apply.tensor.tensor_layout import TensorLayout
from meshwright.errors import MeshwrightError

FOUR = 4


def assert_equals_one_process(name: str, plan: str = "tp=2", num_ranks: int = 2, **options: Any) -> None:
    """Compare losses, evaluations, gradients, parameters and buffers of every rank with a textbook loop's."""
    script = search_jobs.Script(**options)
    plain = search_jobs.train_plainly(name, script)
    for losses, evaluated, *tensors in testing.run_ranks(search_jobs.train, num_ranks, name, plan, script):
        assert losses == pytest.approx(plain[0], rel=FLOAT64)
        assert evaluated == pytest.approx(plain[1], rel=FLOAT64)
        for got, expected in zip(tensors, plain[2:], strict=True):
            testing.assert_parity(got, expected, FLOAT64)


@functools.cache  # layouts are values
def cut_of(name: str, num_samples: int = FOUR, num_parts: int = 2, length: int = search_models.LENGTH) -> TensorLayout:
    model = search_models.build(name)
    return search_jobs.layout_of(model, search_models.batch_of(name, num_samples, 0, length), num_parts)


def blocks_cut(layout: TensorLayout) -> set[str]:
    """Return the blocks that run on shards; layers cut one by one give whole results."""
    return {
        name.split(".")[1] for name, (region, _) in layout.cuts.items() if "layers." in name and not region.is_apart
    }


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 2, 3] if FULL_GRID else [1, 3])
def test_ranks_come_to_the_sums_of_their_terms_in_one_order(zero: int) -> None:
    # One rank's term had a bias and the other's zeros in its place: autograd took the two graphs in other orders.
    layout = cut_of("by_hand")
    assert any("layers.0.second.bias" in region.once for region in layout.regions)
    assert_equals_one_process("by_hand", f"dp=2,tp=2,zero={zero}", 4)


# -- the next block, another call, another mode -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cut"),
    [("activations", {"0", "2"}), ("temperatures", {"0"}), ("indices", {"0", "2"}), ("plain", {"0", "1"})],
)
def test_a_block_of_the_same_shape_is_proven_for_itself(name: str, cut: set[str]) -> None:
    assert blocks_cut(cut_of(name)) == cut


def test_a_second_call_with_another_flag_is_proven_too() -> None:
    layout = cut_of("twice")
    assert not blocks_cut(layout)
    assert layout.alone["layers.0.up.weight"]


def test_more_kinds_of_calls_than_are_proven_leave_a_reason() -> None:
    layout = cut_of("many_ways")
    assert not blocks_cut(layout)
    assert "more than 8 kinds of arguments" in layout.whole["layers.0.up.weight"]


def test_eval_mode_is_proven_too() -> None:
    assert not blocks_cut(cut_of("eval"))


@pytest.mark.parametrize("name", ["activations", "indices", "eval", "twice"])
def test_steps_and_evaluations_equal_one_process(name: str) -> None:
    assert_equals_one_process(name, evaluates_first=True)


# -- few samples, short sequences -------------------------------------------------------------------------------------


def test_layers_that_mix_samples_run_on_slices_of_the_sequence_alone_after_a_batch_of_one() -> None:
    assert [chain.dims for chain in cut_of("samples", 1).chains] == [(1,)]
    assert [chain.dims for chain in cut_of("plain", 1).chains] == [(0, 1)]


def test_layers_that_mix_positions_run_on_slices_of_the_batch_alone() -> None:
    # A sequence of two positions: on two ranks each had one, and over three one had none.
    for num_parts, length in ((2, 2), (3, 2)):
        assert not cut_of("positions", 6, num_parts, length).chains
        assert cut_of("plain", 6, num_parts, length).chains


def test_more_samples_later_equal_one_process() -> None:
    assert_equals_one_process("samples", sizes=((1, 6), (4, 6), (3, 6)))


# -- what is frozen now -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [("norm",), ("layers",), ("layers", "head.bias")])
def test_what_is_frozen_at_first_has_the_right_gradients_later(frozen: tuple[str, ...]) -> None:
    assert_equals_one_process("plain", frozen=frozen)


@pytest.mark.parametrize("frozen", [(), ("norm",), ("layers",), ("",)])
def test_the_layout_does_not_depend_on_what_is_frozen(frozen: tuple[str, ...]) -> None:
    model = search_models.build("plain")
    search_jobs.frozen_first(model, frozen)
    assert search_jobs.layout_of(model, search_models.batch_of("plain", FOUR)) == cut_of("plain")


# -- what a forward leaves --------------------------------------------------------------------------------------------


def test_layers_that_leave_what_depends_on_slices_stay_off_chains() -> None:
    for name in ("aux", "average"):
        layout = cut_of(name)
        assert not layout.chains
        assert blocks_cut(layout) == {"0", "1"}
    assert cut_of("counting").chains


def test_an_attribute_of_hidden_units_keeps_them_whole() -> None:
    layout = cut_of("hidden_aux")
    assert not blocks_cut(layout)
    assert "'aux'" in layout.alone["layers.0.up.weight"]


@pytest.mark.parametrize("name", ["aux", "hidden_aux"])
def test_a_loss_that_adds_what_layers_left_equals_one_process(name: str) -> None:
    assert_equals_one_process(name, loss="aux")


def test_a_running_average_equals_one_process() -> None:
    assert_equals_one_process("average")


def test_the_first_look_leaves_no_attribute_on_the_model() -> None:
    model = search_models.build("aux")
    search_jobs.layout_of(model, search_models.batch_of("aux", FOUR), loss_fn=search_jobs.with_aux(model))
    assert not any(hasattr(child, "aux") for child in model.modules())


# -- who else reads a parameter ---------------------------------------------------------------------------------------


def test_what_the_loss_reads_stays_whole() -> None:
    model = search_models.build("activations")
    layout = search_jobs.layout_of(
        model, search_models.batch_of("activations", FOUR), loss_fn=search_jobs.penalised(model)
    )
    reasons = {name: reason for name, reason in layout.whole.items() if name.endswith("up.weight")}
    assert len(reasons) == 3
    assert all("outside the model's forward reads it (" in reason for reason in reasons.values())


def test_a_penalty_on_every_weight_leaves_nothing_to_cut() -> None:
    with pytest.raises(MeshwrightError, match=r"nothing to cut.*reads it \(norm\)"):
        testing.run_ranks(search_jobs.train, 2, "activations", "tp=2", search_jobs.Script(loss="every"))


class ReadsInside(search_models.Residual):
    """The model's own forward reads a bias of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias: Any = self.get_parameter("layers.0.up.bias")
        return super().forward(x) + bias.norm()


class GivesOut(search_models.Residual):
    """The model returns a weight beside its results."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.get_parameter("layers.0.up.weight")


@pytest.mark.parametrize(
    ("kind", "wanted"),
    # A layer whose bias is read elsewhere may keep its weight in parts: it computes with the whole one.
    [(ReadsInside, {"layers.0.up.weight": "stored"}), (GivesOut, {})],
)
def test_what_code_outside_a_region_uses_stays_whole(
    kind: type[search_models.Residual], wanted: dict[str, str]
) -> None:
    model = kind([search_models.Mlp(), search_models.Mlp()]).double()
    layout = search_jobs.layout_of(model, search_models.batch_of("plain", FOUR), loss_fn=lambda *_: None)
    assert {"layers.1.up.weight", "layers.1.up.bias"} <= layout.cuts.keys()
    kinds = {name: cut.kind for name, (_, cut) in layout.cuts.items() if name.startswith("layers.0.up")}
    assert kinds == wanted
    assert kinds or "reads it" in layout.whole["layers.0.up.weight"]


# -- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dropping", "not_yet_dropping"])
@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_counts_in_every_mode_and_with_every_probability(name: str, training: bool) -> None:
    model = search_models.build(name).train(training)
    layout = search_jobs.layout_of(model, search_models.batch_of(name, FOUR))
    assert all(region.drops for region in layout.regions if region.scope.startswith("layers."))
    assert layout.chains
    assert all(chain.drops for chain in layout.chains)
    assert model.training == training


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sequence_parallel=off"])
def test_an_evaluation_before_the_first_step_leaves_copies_equal(plan: str) -> None:
    # Three samples over two ranks: slices of other sizes draw other amounts of numbers.
    mine, others = testing.run_ranks(search_jobs.drawn_after_evaluation, 2, plan)
    testing.assert_parity(mine, others, 0.0)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "tp=2,pp=2"])
def test_an_evaluation_of_one_sample_before_the_first_step_equals_one_process(plan: str) -> None:
    # BatchNorm cannot train on one sample, and the first look is in training mode.
    for found, expected in testing.run_ranks(search_jobs.evaluated_on_one_sample_first, plan.count("=2") * 2, plan):
        assert found == pytest.approx(expected, rel=FLOAT64)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_an_inspection_between_two_micro_batches_leaves_what_backward_needs(schedule: str) -> None:
    # It put BatchNorm's statistics back by a write, which autograd took for the model's own.
    plan = f"tp=2,pp=2,schedule={schedule},micro_batches=2"
    for found, expected in testing.run_ranks(search_jobs.trained_with_batch_norm, FOUR, plan):
        assert found == pytest.approx(expected, rel=FLOAT64)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_a_rank_that_does_not_look_need_not_cut_its_batch(plan: str) -> None:
    # The user's split= is called where one rank looks at a few samples, and by nobody else.
    first, second = testing.run_ranks(search_jobs.steps_with_a_batch_that_one_rank_cannot_cut, 2, plan, 1)
    assert first == second


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "tp=2,pp=2"])
def test_labels_cut_to_the_longest_of_all_samples_equal_one_process(plan: str) -> None:
    # The first look takes a few samples, whose longest is shorter than the labels.
    for found, expected in testing.run_ranks(search_jobs.cut_to_the_longest, plan.count("=2") * 2, plan):
        assert found == pytest.approx(expected, rel=FLOAT64)


# -- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_norm", "by_frequency", "sparse"])
def test_embeddings_that_do_more_than_look_up_equal_one_process(name: str) -> None:
    assert_equals_one_process(name)
    assert "words.weight" in cut_of(name).cuts


class OwnEmbedding(nn.Module):
    """Looks up with a norm, in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, search_models.WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight, max_norm=1.0)


def test_own_look_ups_that_write_stay_whole() -> None:
    model = search_models.build("max_norm", torch.float32)
    model.words = OwnEmbedding()
    layout = search_jobs.layout_of(model, search_models.batch_of("max_norm", FOUR))
    assert "max_norm" in layout.whole["words.weight"]


# -- torch's fused encoder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["encoder", "encoder_of_one_head"])
def test_evaluation_of_torchs_encoder_equals_one_process(name: str) -> None:
    # One head: attention stays whole, and the fused kernel took half of the feed-forward layer without an error.
    assert_equals_one_process(name)


# -- the search itself ------------------------------------------------------------------------------------------------


def test_as_many_elements_as_units_are_no_vector() -> None:
    assert "up.weight" in cut_of("square").cuts


def test_a_proposal_that_cannot_be_made_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(ways.Options, "regions", broken)
    layout = cut_of.__wrapped__("plain")
    assert "KeyError" in layout.alone["layers.0.mlp.up.weight"]


def test_the_layout_is_the_same_each_time() -> None:
    assert len({repr(cut_of.__wrapped__("activations")) for _ in range(2)} | {repr(cut_of("activations"))}) == 1


def test_an_error_of_the_users_is_the_users_on_the_rank_that_looked() -> None:
    outcomes = testing.run_outcomes(search_jobs.first_step_that_raises, 2, "tp=2")
    errors = [outcome.error for outcome in outcomes]
    assert isinstance(errors[0], ValueError)
    assert "rank 0 ran the model's first batch and raised ValueError: the loss is wrong" in str(errors[1])
    assert "raising_loss" in str(errors[1])


@pytest.mark.parametrize("plan", ["pp=2", "tp=2,pp=2"])
def test_layers_that_are_used_by_methods_lie_where_their_code_runs(plan: str) -> None:
    # A module that nobody calls went to its neighbour's stage: one stage held its weights whole, the other one in parts.
    for found, expected in testing.run_ranks(search_jobs.coded, plan.count("=2") * 2, plan):
        assert found == pytest.approx(expected, rel=FLOAT64)
