"""What a step sends is what the formulas of `compare` say, under pipelines, compression and their mixes.

What the ranks agree on in a step (weights, losses, norms) comes on top of every formula.
"""

from __future__ import annotations

import statistics

import pytest
from tests.parity.jobs import formula_jobs
from tests.scopes import FULL_GRID

import meshwright as mw
from meshwright import testing

CELLS = (
    ("gpt", "pp=2,micro_batches=4"),
    ("skips", "pp=2,micro_batches=3"),
    ("gpt", "pp=2,micro_batches=4,schedule=zbv"),
    ("gpt", "dp=2,compress=int8"),
    ("gpt", "dp=2,zero=2,compress=bf16"),
    ("gpt", "dp=2,zero=3,compress=powersgd,micro_batches=2"),
    ("gpt", "dp=4,zero=1,shard=2,compress=int8"),
    ("gpt", "dp=2,pp=2,zero=3,whole_below=0B,micro_batches=2"),
)

MORE_CELLS = (
    ("gpt", "tp=2,pp=2,micro_batches=2"),
    ("gpt_untied", "pp=2,micro_batches=4"),
    ("gpt", "pp=2,micro_batches=4,precision=bf16"),
    ("gpt", "pp=2,micro_batches=4,recompute=full"),
    ("gpt", "pp=4,micro_batches=4,schedule=zb-h1"),
    ("skips", "pp=3,micro_batches=3"),
    ("gpt", "dp=2,compress=int4"),
    ("gpt", "dp=2,compress=powersgd"),
    ("gpt", "dp=4,compress=int8"),
    ("gpt", "dp=4,zero=1,shard=2,compress=powersgd"),
    ("gpt", "dp=2,pp=2,micro_batches=2,compress=int8"),
    ("gpt", "dp=2,pp=2,zero=1,micro_batches=2"),
    ("gpt", "dp=2,pp=2,zero=2,micro_batches=2"),
    ("gpt_wide", "tp=2,pp=2,micro_batches=2,sequence_parallel=off"),
    ("gpt", "dp=2,tp=2,compress=int8"),
    ("gpt", "dp=2,tp=2,zero=3,micro_batches=2"),
    ("gpt", "dp=2,tp=2,pp=2,zero=3,micro_batches=2"),
)


@pytest.mark.parametrize(("name", "plan"), [*CELLS, *(MORE_CELLS if FULL_GRID else ())])
def test_a_step_sends_what_the_formula_says(name: str, plan: str) -> None:
    found = testing.run_ranks(formula_jobs.sent_and_formula, mw.Plan.parse(plan).num_ranks, name, plan)
    formulas = [formula for _, formula in found if formula is not None]
    assert formulas
    formula = statistics.fmean(formulas)
    assert formula <= statistics.fmean(sent for sent, _ in found) <= 1.006 * formula


def test_a_pipeline_whose_layers_need_numbers_has_no_formula() -> None:
    for sent, formula in testing.run_ranks(formula_jobs.sent_and_formula, 2, "numbers", "pp=2"):
        assert sent > 0
        assert formula is None


def test_what_gradients_are_sent_as() -> None:
    # 256 x 64 float32: 64 blocks of 256 codes and a scale; of 128, two a byte; 4 columns of each factor; vectors as they are.
    assert formula_jobs.payloads("none") == (65536, 1024)
    assert formula_jobs.payloads("bf16") == (32768, 1024)
    assert formula_jobs.payloads("int8") == (64 * 260, 1024)
    assert formula_jobs.payloads("int4") == (128 * 68, 1024)
    assert formula_jobs.payloads("powersgd") == (4 * 4 * (256 + 64), 1024)
