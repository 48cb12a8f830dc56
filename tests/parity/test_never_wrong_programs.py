"""Programs of the fuzzer, reduced to what was wrong with them: each is equal to a plain float64 process, on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # benchmarks is a folder of the repository, not of the package

from benchmarks.fuzz import engine, verdict
from benchmarks.fuzz.classes import MLP, make, step
from benchmarks.fuzz.oracle import run_plain

TIMEOUT_S = 60.0
ZBV = "pp=2,schedule=zbv,micro_batches=2"
INTERLEAVED = "pp=2,schedule=interleaved,virtual=2,micro_batches=2"
EVAL = {"do": "mode", "training": False}
TWO = [step(5, 4), step(6, 4, 2)]


def outcome(program: dict[str, Any]) -> verdict.Verdict:
    return engine.run_program(program, TIMEOUT_S)[0]


@pytest.mark.parametrize("where", ["early", "late"])
def test_a_pipeline_whose_first_look_wrote_a_buffer_of_the_root(where: str) -> None:
    # The look runs in training mode, on one rank; the step in evaluation mode does not write the buffer.
    program = make("pp=2", root={"ema": where}, script=[EVAL, *TWO, {"do": "state"}, {**EVAL, "training": True}, *TWO])
    assert outcome(program).kind == "equal"


@pytest.mark.parametrize("plan", [ZBV, INTERLEAVED, f"dp=2,{ZBV}", f"dp=2,{INTERLEAVED},zero=2"])
def test_a_buffer_of_the_root_where_a_rank_has_several_stages(plan: str) -> None:
    script = [*TWO, {"do": "state"}, {"do": "eval", "n": 4, "t": 4, "batch": 5}, *TWO, {"do": "state"}]
    assert outcome(make(plan, [MLP, MLP], root={"ema": "early", "calls": True}, script=script)).kind == "equal"


@pytest.mark.parametrize("width", [6, 7])
def test_a_part_inside_of_another_stays_cut_while_the_outer_one_runs_whole(width: int) -> None:
    # The outer region goes from the stem into the first block; channels that a norm counts in the second one are its own.
    form = {"norm": "group", "hidden": 6, "act": "GELU", "groups": 1}
    model = {"domain": "images", "width": width, "stem": {"stride": 1}, "head_norm": "rms"}
    blocks = [{"kind": "conv_plain", **form}, {"kind": "residual", **form}]
    program = make("tp=2", blocks, model=model, loss={"kind": "mse"}, script=[step(2, 4), step(2, 6, 2)])
    assert outcome(program).kind == "equal"


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_statistics_move_once_where_stages_divide_a_layer_that_is_computed_again(recompute: str) -> None:
    program = make(f"{INTERLEAVED},recompute={recompute}", [{**MLP, "norm": "batch"}, MLP], script=TWO)
    assert outcome(program).kind == "equal"


def test_in_place_code_where_stages_divide_a_layer_that_is_computed_again() -> None:
    model = {"domain": "images", "width": 7, "stem": {"stride": 2}, "head_norm": "rms", "outputs": 7}
    blocks = [{"kind": "inverted", "norm": "none", "hidden": 6, "act": "relu_", "inplace_residual": True}]
    plan = "pp=2,schedule=interleaved,virtual=2,micro_batches=4,recompute=full"
    program = make(plan, blocks, model=model, loss={"kind": "weighted"}, script=[step(6, 6), step(6, 6, 2)])
    assert outcome(program).kind == "equal"


@pytest.mark.parametrize("state", ["ema", "ema_assigned"])
def test_replicas_begin_each_micro_batch_with_the_buffers_of_the_module(state: str) -> None:
    blocks = [{"kind": "stateful", "state": state, "hidden": 12}]
    program = make("data_parallel,micro_batches=2", blocks, script=[step(8, 6), step(8, 6, 2)])
    assert outcome(program).kind == "equal"


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,pp=2"])
def test_state_that_an_optimizer_has_before_its_first_step_is_cut_with_the_parameters(plan: str) -> None:
    program = make(plan, [MLP], optimizer={"kind": "adagrad", "lr": 0.1}, script=TWO)
    assert outcome(program).kind == "equal"


def test_a_difference_that_the_plain_loop_does_not_have_from_itself_is_no_rounding() -> None:
    program = make("single", [MLP], script=TWO)
    reference, other = run_plain(program), run_plain(program)
    moved = [run_plain(program, seed) for seed in (1, 2, 3)]
    assert verdict.is_rounding([{"records": moved[0]}], reference, moved)
    first = next(iter(other[-1]["grads"].values()))
    first.flat[0] += 1e-7 * abs(first).max()
    assert not verdict.is_rounding([{"records": other}], reference, moved)


@pytest.mark.parametrize("where", ["early", "late"])
@pytest.mark.parametrize("plan", ["dp=2,pp=2", "dp=2,pp=2,zero=1,schedule=interleaved,virtual=2,micro_batches=2"])
def test_a_rank_with_an_empty_share_knows_which_stage_computes_a_buffer(plan: str, where: str) -> None:
    script = [step(1, 4), step(1, 4, 2), {"do": "state"}, step(6, 4, 3), step(1, 4, 4), step(5, 4, 5)]
    found = outcome(make(plan, [MLP, MLP], root={"ema": where}, script=script))
    # Written late and read early by the next batch, it goes back to an earlier stage where stages alternate on a rank.
    assert found.kind == ("refused" if where == "late" and "virtual" in plan else "equal"), found


@pytest.mark.parametrize("plan", ["dp=2,pp=2,zero=3,whole_below=0", f"dp=2,zero=3,whole_below=0,{ZBV}"])
def test_a_call_of_the_model_gathers_what_zero_3_has_sharded_on_each_stage(plan: str) -> None:
    forward = {"do": "forward", "n": 4, "t": 4, "batch": 77}
    script = [step(5, 4), forward, step(6, 4, 2), {"do": "eval", "n": 4, "t": 4, "batch": 5}, forward]
    assert outcome(make(plan, [MLP, MLP], root={"calls": True}, script=script)).kind == "equal"
