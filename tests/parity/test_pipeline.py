"""Pipelines against one plain process: every model, schedule and mix with data parallelism, in float64.

Micro-batches are uneven, sometimes fewer than stages, and some shares are empty. Each model meets one plan, and they take turns;
most styles and three in four of Hugging Face's models are left out. MESHWRIGHT_FULL_GRID=1 runs every model under every plan
with every setting.
"""

from __future__ import annotations

import dataclasses

import pytest
from tests.parity import cases
from tests.parity.harness import Setting, assert_distributed_parity, refusal_of_case
from tests.parity.jobs import pipeline_jobs
from tests.parity.turns import is_cheap, some_of_hugging_face, take_turns
from tests.scopes import FULL_GRID

import meshwright as mw
from meshwright import testing

PLANS = (  # first those that fit few models
    "dp=2,tp=2,pp=2",
    "dp=2,tp=2,pp=2,zero=2",
    "tp=2,pp=2",
    "tp=2,pp=2,schedule=zbv",
    "pp=2",
    "pp=3",
    "pp=4",
    "pp=2,schedule=gpipe",
    "pp=3,schedule=gpipe",
    "pp=2,schedule=interleaved,virtual=2",
    "pp=3,schedule=interleaved,virtual=2",
    "pp=2,schedule=zb-h1",
    "pp=4,schedule=zb-h1",
    "pp=2,schedule=zbv",
    "pp=4,schedule=zbv",
    "dp=2,pp=2",
    "dp=2,pp=2,zero=1",
    "dp=2,pp=2,zero=2",
    "dp=2,pp=2,zero=3,whole_below=0B",
    "dp=2,pp=2,zero=1,schedule=zbv",
    "dp=2,pp=2,zero=3,whole_below=0B,schedule=interleaved,virtual=2",
)

SETTINGS = (
    Setting(num_samples=7, micro_batches=3, max_grad_norm=0.05),
    Setting(num_samples=11, micro_batches=4, plan_words=",recompute=full"),
    Setting(num_samples=5, micro_batches=1),
    Setting(num_samples=7, micro_batches=5, plan_words=",recompute=selective"),
    Setting(num_samples=3, micro_batches=2, max_grad_norm=0.05),
)

NUM_LAYERS = {
    "tiny": 1,
    "odd_layouts": 1,
    "keywords": 1,
    "moving_average": 1,
    "branches": 2,
    "branches_sums": 2,
    "own_loss": 2,
    "recurrent": 2,
    **{f"output_{kind}": 2 for kind in ("dict", "dataclass", "attributes", "namedtuple", "nested", "opaque")},
    "mlp": 3,
    "sparse": 3,
    "sparse_sums": 3,
    "in_place": 3,
    "hooked": 3,
    "old_weight_norm": 3,
    "penalty": 3,
    "tutorial_mlp_100_50_10": 3,
    "tutorial_mlp_10_10_5": 3,
    "example_mlp": 5,
    "data_dependent": 5,
    "tied": 6,
    "lora": 6,
    "lstm": 6,
    "parametrized": 6,
    "tutorial_cnn": 7,
}
"""Calls of layers in one forward, where a model has fewer than eight [count]."""

WHOLE_UNDER_TENSOR = {
    "mlp",
    "hooked",
    "penalty",
    "lora",
    "recurrent",
    "tutorial_mlp_100_50_10",
    "tutorial_mlp_10_10_5",
}
"""Models that tensor parallelism cuts around all of their layers, or not at all: no stage can be cut off."""


def _fits(name: str, plan: str) -> bool:
    parsed = mw.Plan.parse(plan)
    if parsed.tp > 1 and (
        name in WHOLE_UNDER_TENSOR
        or (name in ("checkpointed", "reentrant", "example_mlp") and parsed.num_stages > 3)
        or (name == "example_mlp" and not FULL_GRID)  # in some settings it runs whole
        or (name.startswith("hf_") and not FULL_GRID)  # test_tensor.py has them: proofs, seconds each
    ):
        return False
    if parsed.num_ranks > 4 and name not in ("old_weight_norm", "output_dict") and not FULL_GRID:
        return False  # eight ranks take as long as five other cells
    if parsed.dp > 1 and name == "style_bottleneck":
        return False  # BatchNorm over a part of the batch is not that over the whole
    return parsed.num_stages <= NUM_LAYERS.get(name, 8)


def _is_sound(name: str, plan: str, setting: Setting) -> bool:
    """Tell whether a cell can be exact."""
    if name == "style_bottleneck":
        return setting.micro_batches == 1
    if not FULL_GRID and "tp=2" in plan and name.startswith(("hf_", "gpt")) and setting.micro_batches > 3:
        return False  # a proof for each size of micro-batch on each stage: ten seconds and more with attention
    # It writes over what a layer gave, which selective recompute keeps, and a backward in halves reads again.
    return not (name == "in_place" and "zb" in plan and "selective" in setting.plan_words)


def _matrix() -> list[tuple[str, str, Setting]]:
    styles = list(cases.TENSOR_STYLES)[:: 1 if FULL_GRID else 4]  # test_tensor.py cuts each; stages take layers whole
    names = some_of_hugging_face([*cases.CASES, *styles, *cases.HUGGING_FACE], 2)
    ranks = {plan: mw.Plan.parse(plan).num_ranks for plan in PLANS}
    return take_turns(
        names,
        PLANS,
        SETTINGS,
        num_plans=1,
        fits=lambda name, plan: _fits(name, plan) and is_cheap(name, (plan, ranks[plan])),
        is_sound=_is_sound,
    )


@pytest.mark.parametrize(("name", "plan", "setting"), _matrix(), ids=str)
def test_equals_one_process(name: str, plan: str, setting: Setting) -> None:
    if name == "own_loss" and setting.num_samples < 5:
        setting = dataclasses.replace(setting, num_samples=5)
    assert_distributed_parity(name, mw.Plan.parse(plan).num_ranks, setting, plan_text=plan)


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,schedule=zbv", "dp=2,pp=2,zero=1"])
@pytest.mark.parametrize("name", ["batch_norm", "parametrized", "discriminator"])
def test_equals_one_process_that_takes_the_same_pieces(name: str, plan: str) -> None:
    # E050: BatchNorm sees each micro-batch once.
    if name == "discriminator" and "zbv" in plan:
        plan = "pp=3"  # see below: there are no four pieces
    setting = Setting(num_samples=18, micro_batches=2)
    assert_distributed_parity(name, mw.Plan.parse(plan).num_ranks, setting, plan_text=plan, piecewise=True)


@pytest.mark.parametrize(
    ("name", "num_layers"), [(n, k) for n, k in NUM_LAYERS.items() if k < 4][:: 1 if FULL_GRID else 5]
)
def test_more_stages_than_layers_are_refused(name: str, num_layers: int) -> None:
    messages = testing.run_ranks(refusal_of_case, 4, name, "pp=4")
    for message, fix in messages:
        assert f"calls {num_layers}" in message
        assert fix is not None
        assert f"pp={num_layers}" in fix


@pytest.mark.parametrize("name", ["mlp", "branches"])
def test_a_refusal_of_several_stages_a_rank_has_a_fix_that_works(name: str) -> None:
    # Three and two layers for the four stages of a V.
    fixes = {fix for _, fix in testing.run_ranks(refusal_of_case, 2, name, "pp=2,schedule=zbv")}
    (fix,) = fixes
    assert fix is not None
    plan_text = fix.removeprefix("use ").removesuffix(", which has one stage a rank")
    assert_distributed_parity(name, 2, Setting(num_samples=7, micro_batches=3), plan_text=plan_text)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_number_of_micro_batches(schedule: str, num_ranks: int) -> None:
    # E043: fewer than stages, not a multiple of them, a single sample.
    for micro_batches in (1, 2, 3, 4, 5) if FULL_GRID or num_ranks == 3 else (1, 4):
        virtual = ",virtual=2" if schedule == "interleaved" else ""
        setting = Setting(num_samples=5, micro_batches=micro_batches, num_steps=1)
        assert_distributed_parity("tied", num_ranks, setting, plan_text=f"pp={num_ranks},schedule={schedule}{virtual}")


def test_batches_of_changing_size() -> None:
    # E042: 8, 8, then 5, then 2 (fewer samples than micro-batches), then 8 again.
    for plan, num_ranks in (("pp=2,micro_batches=3", 2), ("pp=3,micro_batches=3", 3)):
        found = testing.run_ranks(pipeline_jobs.train_on_sizes, num_ranks, plan, [8, 8, 5, 2, 8])
        expected = pipeline_jobs.train_on_sizes("single", [8, 8, 5, 2, 8])
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_hooks_of_weights_see_their_gradients(schedule: str) -> None:
    # A backward in halves has the weights' gradients in the second one, and a hook must not be called in the first.
    found = testing.run_ranks(pipeline_jobs.train_with_weight_hooks, 2, f"pp=2,micro_batches=3,schedule={schedule}")
    expected = pipeline_jobs.train_with_weight_hooks("single,micro_batches=3")
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("words", ["schedule=zb-h1", "schedule=1f1b,recompute=full"])
def test_layers_that_differentiate_inside(words: str) -> None:
    # What such a layer asks for is no gradient of a weight, and must not be taken for a first half. (Both at once cannot be:
    # torch recomputes inside of that layer's own call, where no function mode is in force.)
    found = testing.run_ranks(pipeline_jobs.train_with_slopes, 2, f"pp=2,micro_batches=3,{words}")
    expected = pipeline_jobs.train_with_slopes("single,micro_batches=3")
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-11)


def test_inputs_that_every_stage_needs() -> None:
    # E044: a mask for each sample, positions without a sample dim, a float, an object; with the mask, without it.
    for has_mask in (True, False):
        found = testing.run_ranks(pipeline_jobs.train_with_keywords, 3, "pp=3,micro_batches=2", has_mask)
        expected = pipeline_jobs.train_with_keywords("single", has_mask)
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-11)


def test_what_the_layers_of_the_first_stage_decide() -> None:
    # A loop looks at its layer's results to decide what comes next: the head alone is left for the other stage.
    assert_distributed_parity("data_dependent", 2, Setting(num_samples=5, num_steps=2), plan_text="pp=2")


def test_what_cannot_be_cut_is_refused() -> None:
    # No layer is left for a third stage.
    for message, fix in testing.run_ranks(refusal_of_case, 3, "data_dependent", "pp=3"):
        assert "reads values between its layers" in message
        assert fix is not None
        assert "pp=2" in fix


@pytest.mark.parametrize("name", ["mlp", "lora"])
def test_what_tensor_parallelism_cuts_in_one_piece_is_refused(name: str) -> None:
    for message, fix in testing.run_ranks(refusal_of_case, 4, name, "tp=2,pp=2"):
        assert "tensor parallelism" in message
        assert fix is not None
        assert "pp=1" in fix


@pytest.mark.slow
@pytest.mark.skipif(not FULL_GRID, reason="32 processes: MESHWRIGHT_FULL_GRID=1")
def test_a_mesh_of_three_axes_over_32_ranks() -> None:
    assert_distributed_parity("gpt", 32, Setting(num_samples=11, micro_batches=3), plan_text="dp=4,tp=4,pp=2")


def test_statistics_that_follow_one_another_stay_on_one_stage() -> None:
    # Its BatchNorms are called twice in a forward: what stands between the calls is one piece.
    for message, fix in testing.run_ranks(refusal_of_case, 4, "discriminator", "pp=4"):
        assert "with buffers" in message
        assert fix is not None


def test_what_needs_no_gradient_between_stages() -> None:
    # E046: integers, masks, frozen floats and None travel, and a micro-batch may not use what it was sent.
    found = testing.run_ranks(pipeline_jobs.train_mixed, 2, "pp=2,micro_batches=4")
    expected = pipeline_jobs.train_mixed("single")
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-11)


def test_evaluation_before_between_and_after() -> None:
    # E051: other batch sizes, the same loss on every rank, and training is not touched by it.
    for plan, num_ranks in (("pp=2,micro_batches=2", 2), ("dp=2,pp=2,zero=3,whole_below=0B,micro_batches=2", 4)):
        found = testing.run_ranks(pipeline_jobs.evaluate_in_turns, num_ranks, plan)
        expected = pipeline_jobs.evaluate_in_turns("single")
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-11)


def test_outputs_are_on_every_rank() -> None:
    found = testing.run_ranks(pipeline_jobs.outputs, 2, "pp=2,schedule=interleaved,virtual=2")
    expected = pipeline_jobs.outputs("single")
    for outputs in found:
        assert [tuple(t.shape) for t in outputs] == [tuple(t.shape) for t in expected]
        for one, other in zip(outputs, expected, strict=True):
            assert (one - other).abs().max() < 1e-12


def test_a_rank_holds_its_part_alone() -> None:
    rows = testing.run_ranks(pipeline_jobs.what_is_held, 2, "pp=2")
    whole = rows[0]["all"]
    names = [set(row["names"]) for row in rows]
    assert all(row["listed"] == whole for row in rows)  # others' parameters stand there without memory
    assert names[0] | names[1] == set(whole)
    assert names[0] & names[1] == {"wte.weight"}
    assert all(row["optimizer"] == len(row["names"]) for row in rows)
    assert all(row["state"] == sorted(whole) for row in rows)
    assert sum(row["bytes"] for row in rows) < 1.5 * rows[0]["whole_bytes"]
    assert sum(row["listed_bytes"] for row in rows) < 1.5 * rows[0]["whole_bytes"]


def test_the_plan_says_what_was_cut() -> None:
    (line, stages), *_ = testing.run_ranks(pipeline_jobs.plan_of, 2, "pp=2")
    assert set(stages.values()) == {0, 1}
    assert "into 2 stages" in line


def test_given_stages_are_kept_or_refused() -> None:
    given = {"wte": 0, "layers": 1}
    found = testing.run_ranks(pipeline_jobs.stages_given, 2, given)
    assert all(stage == int(name != "wte") for stages in found for name, stage in stages.items())
    for message, fix in testing.run_ranks(pipeline_jobs.refusal_of_stages, 2, {"nothing": 0}):
        assert "'nothing'" in message
        assert fix
    for message, _ in testing.run_ranks(pipeline_jobs.refusal_of_stages, 2, {"wte": 1, "layers": 0}):
        assert "do not decrease" in message


def test_code_that_reads_another_stages_numbers_is_refused() -> None:
    for message, fix in testing.run_ranks(pipeline_jobs.refusal_of_reading, 2, "pp=2"):
        assert "item() of a tensor of 'layers." in message
        assert "that leaves 1 of 2 stages" in message
        assert fix is not None
        assert "pp=1" in fix


@pytest.mark.parametrize(
    "plan", ["pp=2,micro_batches=3", "pp=2,schedule=zbv,micro_batches=3", "tp=2,pp=2,micro_batches=2"]
)
def test_layers_that_chance_leaves_out_are_left_out_on_every_stage(plan: str) -> None:
    # Numbers drawn between layers decide the way: ranks that drew others would wait for each other for ever.
    found = testing.run_ranks(pipeline_jobs.train_with_layer_drop, mw.Plan.parse(plan).num_ranks, plan)
    for losses, ways in found:
        assert losses == found[0][0]
        assert ways == found[0][1]
    assert len(set(found[0][1])) > 1


def test_a_model_whose_loss_is_not_finite_is_left_alone() -> None:
    for kind, unchanged in testing.run_ranks(pipeline_jobs.not_finite, 2, "pp=2,micro_batches=2"):
        assert kind == "NonFiniteError"
        assert unchanged


def test_a_loss_that_reads_numbers_is_computed_where_they_are() -> None:
    found = testing.run_ranks(pipeline_jobs.train_with_reading_loss, 2, "pp=2,micro_batches=2")
    expected = pipeline_jobs.train_with_reading_loss("single")
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-11)
