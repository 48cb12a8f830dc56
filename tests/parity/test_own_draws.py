"""Own loops over models that draw: `model.step`'s losses, whatever the plan, and one device's gradients in repeated forwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity.jobs import drawing_jobs, own_draw_jobs
from tests.tolerances import FLOAT64
from torch import nn

import meshwright as mw
from meshwright import testing

SHARES = {1: (7,), 2: (5, 2)}


@functools.cache
def stepped(case: str) -> drawing_jobs.Trained:
    return drawing_jobs.train(case, "single")


@functools.cache
def adversarial() -> list[float]:
    return own_draw_jobs.adversarial("single", SHARES[1])


@pytest.mark.parametrize("by_call", [True, False])
@pytest.mark.parametrize(
    ("case", "line"), [("gpt", "single"), ("gpt-checkpoint", "single"), ("lstm", "recompute=full")]
)
def test_one_process_draws_what_a_step_draws(case: str, line: str, by_call: bool) -> None:
    losses, norms = own_draw_jobs.simple(case, line, SHARES[1], by_call=by_call)
    assert losses == pytest.approx(stepped(case).losses, rel=FLOAT64)
    assert norms == pytest.approx(stepped(case).norms, rel=FLOAT64)


@pytest.mark.parametrize(
    ("case", "line", "by_call"),
    [
        ("gpt", "dp=2,recompute=full", True),
        ("gpt-checkpoint", "dp=2,zero=3,whole_below=1", True),
        ("gpt", "tp=2,recompute=full", False),
        ("vae", "dp=2,zero=2", False),
    ],
)
def test_ranks_draw_what_a_step_draws(case: str, line: str, by_call: bool) -> None:
    sizes = SHARES[2 if "dp=2" in line else 1]
    job: Any = functools.partial(own_draw_jobs.simple, by_call=by_call)
    for losses, norms in testing.run_ranks(job, 2, case, line, sizes):
        assert losses == pytest.approx(stepped(case).losses, rel=FLOAT64)
        assert norms == pytest.approx(stepped(case).norms, rel=FLOAT64)


def test_an_adversarial_pair_repeats_its_own_forwards_in_one_process() -> None:
    # Torch's own backward, outside of all calls of the library, repeats them too: with other masks the gradients were wrong.
    for line, repeats, plainly in [("single", True, True), ("recompute=full", False, True), ("single", True, False)]:
        found = own_draw_jobs.adversarial(line, SHARES[1], repeats=repeats, plainly=plainly)
        assert found == pytest.approx(adversarial(), rel=FLOAT64), (line, repeats, plainly)


@pytest.mark.parametrize(
    ("line", "repeats"), [("dp=2", True), ("dp=2,zero=3,whole_below=1,recompute=full", False), ("tp=2", True)]
)
def test_an_adversarial_pair_is_one_devices(line: str, repeats: bool) -> None:
    job: Any = functools.partial(own_draw_jobs.adversarial, repeats=repeats)
    for found in testing.run_ranks(job, 2, line, SHARES[2 if "dp=2" in line else 1]):
        assert found == pytest.approx(adversarial(), rel=FLOAT64)


def test_forwards_before_one_step_follow_one_another() -> None:
    wanted = own_draw_jobs.accumulating("single", SHARES[1])
    for found in testing.run_ranks(own_draw_jobs.accumulating, 2, "dp=2", SHARES[2]):
        assert found == pytest.approx(wanted, rel=FLOAT64)


def test_where_split_counts_the_batch_its_calls_are_named() -> None:
    def split(batch: Any, num_parts: int) -> list[Any]:
        return [(x, y) for x, y in zip(batch[0].chunk(num_parts), batch[1].chunk(num_parts), strict=True)]

    model = mw.apply_plan(lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), "single", split=split)
    model(torch.ones(4, 3))
    assert any("(model.loss(batch) and model.step(batch) count by it)" in reason for reason in model.plan.reasons)


def test_views_that_a_script_has_joined_are_told() -> None:
    """On two ranks the rows of a batch's second view lie behind the first one's of each share, not of the batch."""
    job: Any = functools.partial(own_draw_jobs.joined_views, by_view=False)
    for _, reasons in testing.run_ranks(job, 2, "dp=2", SHARES[2]):
        assert any("several rows for each sample" in reason for reason in reasons)
    assert not own_draw_jobs.joined_views("single", SHARES[1], by_view=False)[1]


def test_views_of_a_call_each_are_one_devices() -> None:
    wanted, _ = own_draw_jobs.joined_views("single", SHARES[1], by_view=True)
    job: Any = functools.partial(own_draw_jobs.joined_views, by_view=True)
    for found, reasons in testing.run_ranks(job, 2, "dp=2", SHARES[2]):
        assert found == pytest.approx(wanted, rel=FLOAT64)
        assert not reasons
