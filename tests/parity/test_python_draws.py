"""Draws of Python's and NumPy's generators for one sample after the other: the same numbers under every plan."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.jobs import python_draws_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

PLANS = ["dp=2", "dp=3,zero=3,whole_below=0", "single,micro_batches=3", "dp=2,micro_batches=2", "tp=2", "dp=2,tp=2"]

plainly = functools.cache(jobs.train)


def assert_like_one_device(kind: str, line: str, loop: str = "step") -> None:
    losses, state, reasons = plainly(kind, "single", loop)
    assert not any("rng:" in reason for reason in reasons)
    for found, values, told in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, kind, line, loop):
        assert not any("rng:" in reason for reason in told)
        assert found == pytest.approx(losses, rel=FLOAT64)
        for name, value in state.items():
            torch.testing.assert_close(values[name], value, rtol=FLOAT64, atol=1e-13)


@pytest.mark.parametrize("line", PLANS)
@pytest.mark.parametrize("kind", ["numpy", "python", "dropout", "inner", "doubled", "branches for all"])
def test_loops_over_samples(kind: str, line: str) -> None:
    assert_like_one_device(kind, line)


@pytest.mark.parametrize("line", ["dp=2", "single,micro_batches=3", "tp=2", "pp=2,micro_batches=2"])
@pytest.mark.parametrize("kind", ["seeded", "repeated"])
def test_numbers_of_a_seed_in_the_code_and_of_its_own_checkpoints(kind: str, line: str) -> None:
    assert_like_one_device(kind, line)


def test_a_seed_in_the_code_gives_the_numbers_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    random.seed(5)
    order = random.sample(range(6), 6)
    model = mw.apply_plan(
        functools.partial(jobs.build, "seeded"), "single", loss_fn=jobs.squares, optimizer=torch.optim.SGD
    )
    for step in range(2):
        model.step(jobs.batch(step))
    found: Any = model.module.orders
    assert found
    assert all(own == order for own in found)


@pytest.mark.parametrize("line", ["pp=2,micro_batches=2", "dp=2,pp=2,micro_batches=2,schedule=gpipe"])
@pytest.mark.parametrize("kind", ["numpy", "dropout"])
def test_loops_over_samples_under_pipelines(kind: str, line: str) -> None:
    assert_like_one_device(kind, line)


@pytest.mark.parametrize(
    "line",
    [
        "single,recompute=full",
        "dp=2,recompute=full",
        "dp=2,recompute=selective",
        "dp=2,zero=3,whole_below=0,recompute=full",
        "tp=2,recompute=full",
        "pp=2,micro_batches=2",
        "pp=2,micro_batches=2,schedule=zbv",
        "pp=2,micro_batches=2,schedule=zb-h1",
        "pp=2,micro_batches=2,recompute=full",
        "dp=2,pp=2,micro_batches=2,schedule=interleaved,virtual=2",
    ],
)
def test_layers_that_stages_run_and_backward_repeats(line: str) -> None:
    assert_like_one_device("layered", line)


def test_loops_over_samples_in_an_own_loop() -> None:
    assert_like_one_device("dropout", "dp=2", "own")


@pytest.mark.parametrize("line", ["dp=2", "single,micro_batches=3", "tp=2"])
def test_layers_that_hardly_any_numbers_run(line: str) -> None:
    assert_like_one_device("rare_layers", line)


@pytest.mark.parametrize("line", ["tp=2", "dp=2,tp=2"])
def test_layers_that_the_first_numbers_leave_out_are_cut_with_others(line: str) -> None:
    assert_like_one_device("layerdrop", line)


@pytest.mark.parametrize("loop", ["step", "own"])
def test_numbers_of_the_steps_of_shorter_batches_are_not_told(loop: str) -> None:
    assert_like_one_device("steps", "dp=2", loop)


def test_a_loop_that_chance_ends_does_so_soon_in_trials() -> None:
    """All of a trial's numbers may be on one side: 1000 calls of a layer took the first step minutes."""
    jobs.train("repeats", "single,micro_batches=2")
    assert jobs.Repeats.most < 200


def test_samples_and_steps_have_masks_of_their_own() -> None:
    losses, _, _ = plainly("numpy", "single", "step")
    assert len(set(losses)) == jobs.STEPS


def test_loops_whose_turns_values_decide_are_told() -> None:
    for _, _, told in testing.run_ranks(jobs.train, 2, "uneven", "dp=2"):
        assert any("may draw a number for each sample" in reason for reason in told)


def test_numbers_of_all_samples_that_have_changed_nothing_in_the_trials_are_told() -> None:
    for _, _, told in testing.run_ranks(jobs.train, 2, "doubled together", "dp=2"):
        assert any("may draw a number for each sample" in reason for reason in told)


@pytest.mark.parametrize("kind", ["branches", "branches together"])
def test_draws_for_each_sample_on_a_branch_that_chance_opens_are_told(kind: str) -> None:
    for _, _, told in testing.run_ranks(jobs.train, 2, kind, "dp=2"):
        assert any("may draw a number for each sample" in reason for reason in told)


@pytest.mark.parametrize("line", ["dp=2", "single,micro_batches=3"])
def test_parts_that_draw_for_fewer_steps_have_the_whole_s_numbers_and_are_told(line: str) -> None:
    losses, state, _ = plainly("shorter", "single")
    for found, values, told in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, "shorter", line):
        assert any("draws more or less often for parts of the first batch" in reason for reason in told)
        assert found == pytest.approx(losses, rel=FLOAT64)
        for name, value in state.items():
            torch.testing.assert_close(values[name], value, rtol=FLOAT64, atol=1e-13)


def test_loops_that_begin_later_are_told() -> None:
    for _, _, told in testing.run_ranks(jobs.train, 2, "later", "dp=2"):
        assert any("draws by Python's or NumPy's generator where it did not" in reason for reason in told)


@pytest.mark.parametrize(
    ("kind", "num_samples", "text"),
    [
        ("rare", jobs.NUM_SAMPLES, "in what order Python's or NumPy's generator"),
        ("chosen", 2, "may draw a number for each sample"),
        ("mixed", jobs.NUM_SAMPLES, "may draw a number for each sample"),
        ("begun", jobs.NUM_SAMPLES, "draws by Python's or NumPy's generator where it did not"),
    ],
)
def test_what_the_first_numbers_do_not_show_is_told(kind: str, num_samples: int, text: str) -> None:
    for _, _, told in testing.run_ranks(jobs.train, 2, kind, "dp=2", "step", num_samples):
        assert any(text in reason for reason in told)


def test_the_scripts_generators_go_on_as_they_would() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.random(), np.random.rand()
    functions = random.random, np.random.rand
    jobs.train("numpy", "single")
    assert functions == (random.random, np.random.rand)  # nothing is left in their place
    random.seed(1)
    np.random.seed(1)
    model = mw.apply_plan(
        functools.partial(jobs.build, "numpy"),
        "single",
        loss_fn=jobs.squares,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    model.step(jobs.batch(0))
    assert (random.random(), np.random.rand()) == before
