"""Stages as the planner foresees them are those that the runtime makes."""

from __future__ import annotations

import functools
import itertools

import pytest
from tests.parity.jobs import building_jobs, checkpoint_jobs

import meshwright as mw
from meshwright import testing
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.stages import own_cut

CASES = [
    ("words", "pp=2,micro_batches=2"),
    ("words", "pp=3,micro_batches=3"),
    ("words", "pp=2,tp=2,micro_batches=2"),
    ("images", "pp=2,micro_batches=2"),
    ("images", "pp=3,micro_batches=3"),
    ("images", "pp=2,schedule=zbv,micro_batches=2"),
    ("images", "pp=2,schedule=interleaved,virtual=2,micro_batches=2"),
]
"""Models with more layers than stages: the runtime looks into the layers of others."""


@pytest.mark.parametrize(("kind", "line"), CASES)
def test_stages_are_those_that_the_planner_foresees(kind: str, line: str) -> None:
    plan, batch = mw.Plan.parse(line), checkpoint_jobs.batch(kind, 0)
    spec = mw.describe_model(functools.partial(checkpoint_jobs.build, kind), batch, loss_fn=checkpoint_jobs.loss_fn)
    train = mw.TrainSpec(global_batch_size=len(batch[0]))
    bounds = own_cut(spec, Setup.of(spec, plan, train))
    foreseen = {
        spec.layers[place].name: stage
        for stage, (first, last) in enumerate(itertools.pairwise(bounds))
        for place in range(first, last)
    }
    for made in testing.run_ranks(building_jobs.stages, plan.num_ranks, line, kind):
        assert {name: foreseen[name] for name in made if name in foreseen} == {
            name: stage for name, stage in made.items() if name in foreseen
        }
        assert len(set(made) & set(foreseen)) >= plan.num_stages
