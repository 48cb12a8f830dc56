"""Offered plans run: a few of those that benchmarks/planner/offers.py runs, of models that not every plan can cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # benchmarks is a folder of the repository, not of the package

from benchmarks.planner import offers
from benchmarks.planner.offered_models import MODELS

import meshwright as mw

RANKS = 4
SAMPLE = ("autoencoder", "LoRA", "LSTM, packed, and GRU", "two branches by a flag", "branch on values")


def _of_each_kind(plans: list[mw.Plan]) -> list[mw.Plan]:
    """Return the plan with the most stages of each kind: with tp and pp, with one of them, with neither."""
    found: dict[tuple[bool, bool], mw.Plan] = {}
    for plan in sorted(plans, key=lambda plan: -plan.num_stages):
        found.setdefault((plan.tp > 1, plan.pp > 1), plan)
    return list(found.values())


@pytest.mark.parametrize("name", SAMPLE)
def test_the_best_plans_of_a_model_run_and_compute_what_one_device_does(name: str) -> None:
    case = MODELS[name].case
    spec = mw.describe_model(case.build, case.batch(offers.SAMPLES, 0), loss_fn=case.loss_fn)
    plans = _of_each_kind(list(offers.offers(spec, RANKS, top=5)))
    assert plans
    for plan in plans:
        outcome = offers.run_plan(name, plan)
        assert outcome["verdict"] == "equal", f"{plan}: {outcome}"
