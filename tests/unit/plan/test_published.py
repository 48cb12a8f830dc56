"""Published rows as setups: any row gets an answer or a reason, and BLOOM's plan is the one that its engineers found."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(
    0, str(Path(__file__).resolve().parents[3])
)  # benchmarks is a folder of the repository, not of the package

from benchmarks.planner import bloom, errors
from benchmarks.planner.evaluate import Judge, as_read
from benchmarks.planner.rows import setup_of
from benchmarks.planner.software import software_of

PLAN = (4, 12, 8, 2)
"""TP4 PP12 DP8, micro-batches of 2: BLOOM's, at 104.7 s a step (bigscience-workshop/bigscience, train/tr11-176B-ml)."""

STRANGE: tuple[Any, ...] = (None, 0, -1, 0.5, 1e30, float("nan"), "", "words", [], {}, True)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def measured(**changes: Any) -> dict[str, Any]:
    row = bloom.row_of(*PLAN)
    row |= {"status": "ok", "usable_for": ["time", "memory"], "mem_kind": "nvidia-smi"}
    return row | {"measured": {"step_time_s": 104.7, "peak_mem_GB": 59.0}} | changes


def mutated(seed: int) -> dict[str, Any]:
    """Return a row of which some fields are missing, null or nonsense."""
    draw = random.Random(seed)
    row = measured(id=f"row {seed}")
    for _ in range(draw.randint(1, 3)):
        places: list[dict[str, Any]] = [row, *(part for part in row.values() if isinstance(part, dict) and part)]
        place = draw.choice(places)
        name = draw.choice(sorted(place))
        if draw.random() < 0.3:
            del place[name]
        else:
            place[name] = copy.copy(draw.choice(STRANGE))
    return row


def test_bloom_gets_the_plan_that_its_engineers_found() -> None:
    seconds, best = bloom.ranked()[0]
    assert best == PLAN
    assert best in bloom.WITHIN_TWO_PERCENT
    assert seconds == pytest.approx(104.7, rel=0.1)


def test_every_row_gets_an_answer_or_a_reason(judge: Judge) -> None:
    rows = [mutated(seed) for seed in range(400)]
    answers = [judge.answer_or_reason(row) for row in rows]
    assert all(answer["why"] for answer in answers)
    told = [answer for answer in answers if answer["step_time_s"] is not None]
    assert all(answer["step_time_s"] > 0 and answer["peak_memory_bytes"] > 0 for answer in told)
    assert len(told) > 100, "most fields are not needed"
    predicted = {id(row): answer["step_time_s"] for row, answer in zip(rows, answers, strict=True)}
    known = [row for row in errors.usable(rows) if predicted[id(row)] is not None]
    table = errors.errors_of(known, lambda row: predicted[id(row)])
    assert "constant" in errors.show(table)
    assert "told so" in errors.show_memory(errors.memory_errors(list(zip(rows, answers, strict=True))))


@pytest.mark.parametrize("row", [None, [], "row", {}, {"id": 7}, {"model": None, "hardware": None}])
def test_what_is_no_row_gets_a_reason(row: Any, judge: Judge) -> None:
    assert judge.answer_or_reason(row)["step_time_s"] is None


def test_unknown_devices_and_groups_are_costed(judge: Judge) -> None:
    row = measured(group="nobody", source="a paper of 2030")
    row["hardware"] = row["hardware"] | {"gpu": "H300-SXM9"}
    assert judge.answer_or_reason(row)["step_time_s"] > 0
    row["hardware"] = row["hardware"] | {"gpu": "Quantum"}
    assert judge.answer_or_reason(row)["step_time_s"] > 0


def test_a_table_prints_both_baselines_and_a_mean_over_groups() -> None:
    rows = [measured(id="one"), measured(id="two", group="nobody")]
    text = errors.show(errors.errors_of(rows, lambda row: 100.0))
    assert all(word in text for word in ("constant", "Calculon", "28.9"))
    assert text.splitlines()[-1].startswith("over groups: median 4.5 %")


def test_memory_is_told_as_it_was_read() -> None:
    assert as_read(10e9, "torch_max_allocated(max over stages)") == 10e9
    assert as_read(10e9, None) == 10e9
    assert as_read(10e9, "nvidia-smi") > as_read(10e9, "torch_max_reserved_max_over_ranks") > 10e9


def test_a_rows_software_is_that_of_its_source() -> None:
    assert setup_of(measured()).blocks_on_messages, "Megatron-DeepSpeed"
    notes = "recipes for some of these use FSDP"
    assert software_of(measured(group="megatron-bridge", source="", notes=notes), recent=True).fused
    assert not software_of(measured(group="misc", source="", notes=notes), recent=True).fused
