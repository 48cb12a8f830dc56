"""Programs of the fuzzer, the same ones each time; benchmarks/fuzz/README.md says how to run it for as long as one likes."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # benchmarks is a folder of the repository, not of the package

from benchmarks.fuzz import engine, shrink, verdict
from benchmarks.fuzz.classes import MLP, make, programs, step
from benchmarks.fuzz.draw import PLAN_KINDS, draw
from benchmarks.fuzz.program import complete, features
from tests.scopes import FULL_GRID

TIMEOUT_S = 60.0  # the pool's own
OPEN: dict[int, str] = {}
"""Seeds that found something which is not mended yet; each comes out with its mend."""
NUM_SEEDS = 43


def _seeds() -> list[int]:
    """Return the first seed of each kind of plan; all of them where `FULL_GRID` is set. The campaign draws thousands."""
    seeds = [seed for seed in range(NUM_SEEDS) if seed not in OPEN]
    return seeds if FULL_GRID else sorted({draw(seed)["kind"]: seed for seed in reversed(seeds)}.values())


def outcome(program: dict[str, Any]) -> verdict.Verdict:
    return engine.run_program(program, TIMEOUT_S)[0]


@pytest.mark.parametrize("seed", _seeds())
def test_no_program_goes_wrong(seed: int) -> None:
    program = draw(seed)
    found = outcome(program)
    assert found.kind not in verdict.BUGS, f"{found}\n{shrink.standalone(program)}"


def test_a_seed_is_a_program() -> None:
    for seed in range(200):
        program = draw(seed)
        assert draw(seed) == program
        assert json.loads(json.dumps(program)) == program  # it travels to the ranks as text
        assert complete(copy.deepcopy(program)) == program
        assert draw(seed + 1) != program


def test_programs_have_everything_in_them() -> None:
    made = [draw(seed) for seed in range(700)]
    seen = {feature for program in made for feature in features(program)}
    assert {program["kind"] for program in made} == set(PLAN_KINDS)
    for name in (
        "block:attention",
        "block:experts",
        "block:recurrent",
        "blocks:shared",
        "script:freeze",
        "script:eval",
        "root:ema",
    ):
        assert name in seen
    assert len(seen) > 170


def test_most_programs_run_in_plain_torch() -> None:
    outcomes = [engine.plain_records(draw(seed)) for seed in range(30)]
    assert sum(isinstance(records, str) for records in outcomes) < 8


def test_each_class_of_defect_runs_in_plain_torch() -> None:
    for name, program in programs().items():
        records = engine.plain_records(program)
        assert not isinstance(records, str), f"{name}: {records}"


def _records_of(program: dict[str, Any], change: float) -> list[dict[str, Any]]:
    records = engine.plain_records(program)
    assert not isinstance(records, str)
    if change:
        first = next(iter(records[-1]["grads"].values()))
        first.flat[0] += change * abs(first).max()
    return records


@pytest.mark.parametrize(("change", "kind"), [(0.0, "equal"), (1e-12, "equal"), (1e-7, "wrong")])
def test_a_difference_is_a_verdict(change: float, kind: str) -> None:
    program = make("single", [MLP], script=[step(), step(batch=2)])
    rank = {"records": _records_of(program, change), "error": None, "cut": None, "reasons": []}
    found = verdict.judge(_records_of(program, 0.0), [rank], None)
    assert found.kind == kind


def test_ranks_that_differ_by_a_bit_are_wrong() -> None:
    program = make("dp=2", [MLP], script=[step()])
    ranks = [{"records": _records_of(program, c), "error": None, "cut": None, "reasons": []} for c in (0.0, 1e-15)]
    found = verdict.judge(_records_of(program, 0.0), ranks, None)
    assert found.kind == "wrong"
    assert "rank 1 against rank 0" in found.detail


def test_a_program_shrinks_to_what_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(program: dict[str, Any], _: float) -> tuple[verdict.Verdict, float]:
        is_wrong = any(form.get("act") == "softmax" for form in program["model"]["blocks"])
        return verdict.Verdict("wrong" if is_wrong else "equal"), 0.0

    monkeypatch.setattr(engine, "run_program", judged)
    program = make("dp=2,tp=2,zero=1,micro_batches=3", [MLP, {**MLP, "act": "softmax", "gain": True}, MLP], clip=1.0)
    smallest, found = shrink.shrink(program)
    assert found.kind == "wrong"
    assert smallest["plan"].count(",") == 0
    assert smallest["clip"] is None
    assert len(smallest["script"]) == 1
    assert smallest["model"]["blocks"] == [{"kind": "mlp", "act": "softmax"}]


def test_a_weight_that_a_hook_computes_is_there_where_shapes_are_found() -> None:
    # Shapes of the last layer are found on the first stage, on a copy whose hooks have not run.
    block = {"kind": "attention", "heads": 2, "fused": "none", "qk_norm": True, "linear": "old_weight_norm"}
    model = {
        "domain": "tokens", "width": 8, "outputs": 7, "root": {}, "vocabulary": 11, "stem": {}, "pool": "none",
        "blocks": [{**block, "bias": True, "sdpa": False, "causal": False, "rotary": False}], "calls": [[0, False]],
        "head_norm": "layer", "head_bias": True, "output": "tensor",
    }  # fmt: skip
    program = {
        "seed": 0, "plan": "tp=2,pp=2", "data_seed": 1337, "model": model, "loss": {"kind": "ce"}, "mask": False,
        "batch_form": "dict", "optimizer": {"kind": "sgd", "lr": 0.3}, "clip": None, "built_first": False,
        "script": [{"do": "step", "n": 5, "t": 1, "batch": 3}],
    }  # fmt: skip
    found = outcome(complete(program))
    assert found.kind == "equal", found.detail
