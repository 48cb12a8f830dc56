"""Tensor parallelism, alone and with data parallelism, against one plain process: every model, in float64.

Each model meets one plan, and they take turns; of Hugging Face's models every fourth one is here, and of those that differ in
the form of their outputs alone every second one.
MESHWRIGHT_FULL_GRID=1 runs every model under every plan with every setting.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from tests.parity import cases
from tests.parity.harness import Setting, assert_distributed_parity, refusal_of_case
from tests.parity.jobs import tensor_jobs
from tests.parity.turns import is_cheap, some_of_forms, some_of_hugging_face, take_turns
from tests.scopes import FULL_GRID
from tests.tolerances import FLOAT32, FLOAT64
from torch import Tensor

import meshwright as mw
from meshwright import testing

PLANS = (
    ("tp=2", 2),
    ("tp=3", 3),
    ("tp=4", 4),
    ("dp=2,tp=2", 4),
    ("dp=2,tp=2,zero=1", 4),
    ("dp=2,tp=2,zero=2", 4),
    ("dp=2,tp=2,zero=3,whole_below=0B", 4),
    ("tp=2,sequence_parallel=off", 2),
    ("tp=4,sequence_parallel=off", 4),
)

NEEDS_EMPTY_HEADS = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="two ranks have no heads; torch 2.11 divides by their number, so layers are cut singly",
)

SETTINGS = (
    Setting(num_samples=5),
    Setting(num_samples=5, micro_batches=2, max_grad_norm=0.05),
    Setting(num_samples=4, micro_batches=2, plan_words=",recompute=selective"),  # equal ones: no size is proven anew
    Setting(num_samples=5, max_grad_norm=0.05, plan_words=",recompute=full"),
    Setting(num_samples=7, micro_batches=3),
)

EIGHT = (
    ("dp=4,shard=2,tp=2,zero=1", 8),
    ("dp=4,shard=2,tp=2,zero=3,whole_below=0B", 8),
    ("tp=8", 8),
    ("tp=8,sequence_parallel=off", 8),
)
"""Eight ranks: sharded over neighbours and tensor parallelism, and all of them in one layer."""

# (model, plan, ranks, setting); the first of them in every run. Uneven units, and ranks that have none of the heads.
MANY = [
    ("gpt_8_heads_of_2", *EIGHT[1], SETTINGS[1]),
    ("mlp", *EIGHT[0], SETTINGS[2]),
    ("gpt_8_heads_of_2", *EIGHT[2], SETTINGS[0]),
    ("mlp", *EIGHT[3], SETTINGS[3]),
    ("gpt_3_heads_of_3", *PLANS[2], SETTINGS[1]),
    ("gpt_2_heads_of_1", *PLANS[8], SETTINGS[3]),
]
if FULL_GRID:
    MANY = [
        *(
            (name, *plan, setting)
            for name in ("mlp", "gpt_8_heads_of_8", "gpt_8_heads_of_2")
            for plan in EIGHT
            for setting in SETTINGS
        ),
        *(
            (name, *PLANS[i], setting)
            for name in ("gpt_3_heads_of_3", "gpt_2_heads_of_1")
            for i in (2, 8)
            for setting in SETTINGS
        ),
    ]

SAME_BLOCKS = ("hf_llama_own_loss", "hf_llama_tied", "hf_bert_classifier")
"""Models whose blocks are those of another one: they differ in head and loss."""

BLOCKS = [name for name in cases.HUGGING_FACE if name not in SAME_BLOCKS][:: 1 if FULL_GRID else 2]
"""Models of whose blocks nearly all is cut; `benchmarks/any_model` has the others."""

UNCUT = ("tiny",)
"""Scalars and vectors. Refused, see below."""


def _fits(name: str, plan: tuple[str, int]) -> bool:
    if name in cases.HUGGING_FACE and "tp=4" in plan[0] and not FULL_GRID:
        return False  # the search of four shards takes as long as thirty other cells; `MANY` has fewer heads than ranks
    if name in cases.TENSOR_STYLES and plan[1] > 3 and not FULL_GRID:
        return False  # how a style is cut is no question of dp, and two or three shards show it
    # BatchNorm over a part of the batch is not that over the whole.
    return is_cheap(name, plan) and not (name == "style_bottleneck" and "dp" in plan[0])


def _is_sound(name: str, _plan: tuple[str, int], setting: Setting) -> bool:
    """Tell whether a cell can be exact."""
    if name in cases.TENSOR_STYLES and not FULL_GRID and setting.micro_batches > 1:
        return False  # a proof for each size of micro-batch; the other models have them
    if name in cases.HUGGING_FACE and not FULL_GRID and setting.num_samples % setting.micro_batches:
        return False  # likewise; attention takes seconds each
    return name != "style_bottleneck" or setting.micro_batches == 1


def _matrix() -> list[tuple[str, str, int, Setting]]:
    names = [name for name in (*cases.CASES, *cases.TENSOR_STYLES, *cases.HUGGING_FACE) if name not in UNCUT]
    names = some_of_forms(some_of_hugging_face(names, 0))
    rows = take_turns(names, PLANS, SETTINGS, num_plans=1, fits=_fits, is_sound=_is_sound)
    return [(name, *plan, setting) for name, plan, setting in rows]


@pytest.mark.parametrize(("name", "plan", "num_ranks", "setting"), _matrix(), ids=str)
def test_equals_one_process(name: str, plan: str, num_ranks: int, setting: Setting) -> None:
    if name == "own_loss" and setting.num_samples < 4:
        setting = dataclasses.replace(setting, num_samples=4)  # the fourth row is the first with several labels
    assert_distributed_parity(name, num_ranks, setting, plan_text=plan)


@pytest.mark.parametrize("words", ["", ",sequence_parallel=off"])
def test_packed_heads_on_more_ranks_than_key_heads_in_micro_batches(words: str) -> None:
    # Micro-batches of as many samples as there are key heads: sizes of a view tell one from the other by their place alone.
    assert_distributed_parity("style_packed", 3, SETTINGS[1], plan_text=f"tp=3{words}")


@pytest.mark.parametrize(("name", "plan", "num_ranks", "setting"), MANY, ids=str)
def test_many_ranks_equal_one_process(name: str, plan: str, num_ranks: int, setting: Setting) -> None:
    assert_distributed_parity(name, num_ranks, setting, plan_text=plan)


_IN_PIECES = take_turns(
    cases.PIECEWISE, [PLANS[0], PLANS[4], PLANS[6]], [Setting(num_samples=10, micro_batches=2)], num_plans=2
)


@pytest.mark.parametrize(
    ("name", "plan", "num_ranks", "setting"), [(name, *plan, setting) for name, plan, setting in _IN_PIECES], ids=str
)
def test_equals_one_process_that_takes_the_same_pieces(name: str, plan: str, num_ranks: int, setting: Setting) -> None:
    # What is normalised together, or branches on values, depends on the cutting of the batch, which is that of dp.
    assert_distributed_parity(name, num_ranks, setting, plan_text=plan, piecewise=True)


@pytest.mark.parametrize("name", UNCUT)
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    message, fix = testing.run_ranks(refusal_of_case, 2, name, "tp=2")[0]
    assert "nothing to cut" in message
    assert fix == "use the plan 'dp=2'"


def test_a_part_around_other_parts_runs_cut() -> None:
    # Its copy got their shards of running means, so that nothing more could be proven with it, and the part ran whole.
    assert_distributed_parity("style_bottleneck", 2, SETTINGS[0], plan_text="tp=2,sequence_parallel=off")


def test_calls_that_run_whole_fail_a_cell() -> None:
    # The control: whatever is equal then, nothing that is cut was compared.
    for complaint in testing.run_ranks(tensor_jobs.complaint_of_calls_that_run_whole, 2, ""):
        assert "'inner.layers.0': a TorchFunctionMode" in complaint
    assert set(testing.run_ranks(tensor_jobs.complaint_of_calls_that_run_whole, 2, "a TorchFunctionMode")) == {""}


def test_adamw_in_float32() -> None:
    gradients, losses, expected_gradients, expected_losses = testing.run_ranks(tensor_jobs.train_in_float32, 2, "tp=2")[
        0
    ]
    assert losses == pytest.approx(expected_losses, rel=FLOAT32)
    testing.assert_parity(gradients, expected_gradients, FLOAT32)


@pytest.mark.parametrize("name", BLOCKS)
def test_nearly_all_of_a_block_is_cut(name: str) -> None:
    share, layouts, reasons = testing.run_ranks(tensor_jobs.share_cut, 2, name)[0]
    assert share >= 0.9
    assert set(layouts.values()) <= {"column", "row", "vocabulary", "whole"}
    assert any(reason.startswith("tp=2 cuts") for reason in reasons)
    whole = [name for name, kind in layouts.items() if kind == "whole"]
    assert whole
    assert any("whole" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("words", "kinds"), [(",sequence_parallel=off", {"all_reduce": 4}), ("", {"all_gather": 4, "reduce_scatter": 4})]
)
def test_exchanges_of_a_block(words: str, kinds: dict[str, int]) -> None:
    few = testing.run_ranks(tensor_jobs.exchanges, 2, f"tp=2{words}", 1)[0]
    many = testing.run_ranks(tensor_jobs.exchanges, 2, f"tp=2{words}", 2)[0]
    more = {kind: many[kind][0] - few.get(kind, (0, 0))[0] for kind in many}
    assert {kind: count for kind, count in more.items() if count} == kinds
    more_bytes = sum(many[kind][1] - few.get(kind, (0, 0))[1] for kind in many)
    # 4 samples x 6 tokens x width 16 in float64, each time; on slices also the gradients of one more block's two norms, each with
    # an entry that says whether there is one.
    norms = 0 if words else 2 * (16 + 1) * 8
    assert more_bytes == sum(kinds.values()) * 4 * 6 * 16 * 8 + norms


@pytest.mark.parametrize(
    ("plan", "num_ranks"),
    [
        ("tp=2", 2),
        pytest.param("tp=4,sequence_parallel=off", 4, marks=NEEDS_EMPTY_HEADS),
        ("tp=2,micro_batches=2", 2),
        ("dp=2,tp=2,zero=1", 4),
    ],
)
def test_a_step_exchanges_what_the_formula_says(plan: str, num_ranks: int) -> None:
    for exchanged, predicted in testing.run_ranks(tensor_jobs.exchanged_and_predicted, num_ranks, plan):
        assert predicted is not None
        assert exchanged == predicted.tensor_bytes
        assert (predicted.all_gather > 0) == ("off" not in plan)


def test_dropout_differs_on_shards_and_agrees_on_copies() -> None:
    found = testing.run_ranks(tensor_jobs.dropout_masks, 2, "tp=2,sequence_parallel=off")
    (inside, outside), (other_inside, other_outside) = found
    assert (inside == 0).any()
    assert not ((inside == 0) == (other_inside == 0)).all()
    assert (outside == other_outside).all()
    assert (outside == 0).any()


@functools.cache
def _trained_with_dropout(plan: str) -> list[dict[str, Tensor]]:
    return testing.run_ranks(tensor_jobs.train_with_dropout, 2, plan)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sequence_parallel=off"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_draws_the_same(plan: str, recompute: str) -> None:
    plain = _trained_with_dropout(plan)
    again = testing.run_ranks(tensor_jobs.train_with_dropout, 2, f"{plan},recompute={recompute}")
    for name, value in plain[0].items():
        assert (value == again[0][name]).all(), name
        assert (value == plain[1][name]).all(), name


def test_an_inspection_is_no_part_of_a_forward_whose_results_are_kept() -> None:
    plan = "tp=2,sequence_parallel=off"
    for found in testing.run_ranks(tensor_jobs.train_with_dropout, 2, f"{plan},recompute=selective"):
        assert all((value == found[name]).all() for name, value in _trained_with_dropout(plan)[0].items())


def test_a_plan_says_what_stays_whole() -> None:
    layouts = testing.run_ranks(tensor_jobs.layouts_with, 2, {"layers.0.ffn.up.weight": "whole"})[0]
    assert layouts["layers.0.ffn.up.weight"] == "whole"
    assert layouts["layers.1.ffn.up.weight"] == "column"


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ({"layers.0.ffn.upp.weight": "whole"}, "did you mean"),
        ({"layers.0.ffn.up.weight": "rows"}, "did you mean 'row'"),
    ],
)
def test_layouts_that_mean_nothing_are_refused(layouts: dict[str, str], said: str) -> None:
    assert said in testing.run_ranks(tensor_jobs.refusal_of_layouts, 2, layouts)[0]


def test_a_compiled_model_is_refused() -> None:
    message, fix = testing.run_ranks(tensor_jobs.refusal_of_compiled, 2)[0]
    assert "cannot be followed" in message
    assert "leave torch.compile out" in fix


def test_the_first_forward_may_come_before_a_step() -> None:
    outputs, plain, evaluated, state, plain_state = testing.run_ranks(tensor_jobs.call_first, 2, "tp=2")[0]
    assert (outputs - plain).abs().max() <= FLOAT64 * plain.abs().max()
    assert evaluated > 0
    testing.assert_parity(state, plain_state, 0.0)


def test_an_example_batch_decides_at_once() -> None:
    assert "column" in testing.run_ranks(tensor_jobs.layouts_of_example, 2, "tp=2")[0].values()


def test_a_closed_model_has_its_shapes_and_no_values() -> None:
    shapes, expected, is_nan = testing.run_ranks(tensor_jobs.close_model, 2, "tp=2")[0]
    assert shapes == expected
    assert is_nan


def test_an_optimizer_of_whole_matrices_gets_them() -> None:
    state, plain = testing.run_ranks(tensor_jobs.train_with_whole_matrices, 2, "tp=2")[0]
    testing.assert_parity(state, plain, FLOAT64)


def test_whole_matrices_that_are_cut_twice_are_refused() -> None:
    message, fix = testing.run_ranks(tensor_jobs.refusal_of_whole_matrices, 4, "dp=2,tp=2,zero=1")[0]
    assert "whole matrices" in message
    assert "zero=0" in fix


def test_a_function_of_the_users_own() -> None:
    gradients, plain, layouts = testing.run_ranks(tensor_jobs.custom_function, 2, "tp=2")[0]
    testing.assert_parity(gradients, plain, FLOAT64)
    assert "column" in layouts.values()


@pytest.mark.parametrize("plan", ["dp=2,tp=2,zero=1", "dp=2,tp=2,zero=2"])
def test_gradients_of_what_a_rank_holds_nothing_of(plan: str) -> None:
    for gradients, expected, layouts in testing.run_ranks(tensor_jobs.one_head, 4, plan):
        testing.assert_parity(gradients, expected, FLOAT64)
        assert set(layouts.values()) != {"whole"}


def test_looking_at_a_model_leaves_it_as_it_was() -> None:
    for found in testing.run_ranks(tensor_jobs.side_effects, 2, "tp=2"):
        assert found == (0, 0.0, True, True)


def test_shards_hold_their_part_of_the_memory() -> None:
    held = testing.run_ranks(tensor_jobs.held, 2, "tp=2")
    plain = testing.run_ranks(tensor_jobs.held, 2, "dp=2")
    for kind in ("parameters", "gradients", "optimizer"):
        assert held[0][kind] < 0.53 * plain[0][kind]


def test_wide_meshes_parse() -> None:
    assert mw.Plan.parse("dp=2,tp=2").mesh.groups("tp") == ((0, 1), (2, 3))
