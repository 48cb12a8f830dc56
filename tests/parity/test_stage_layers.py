"""Layers that stages share, or run by methods, where some of their weights are cut: one process's losses."""

from __future__ import annotations

import pytest
from tests.parity.jobs.stage_layer_jobs import trained
from tests.tolerances import FLOAT64

from meshwright import testing


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("adapters", "tp=2,pp=2,micro_batches=2"),  # one stage held an adapter in parts, the other one whole
        ("encoder", "tp=2,pp=2,micro_batches=2"),  # the paths of its stages are compared in test_path_hash
        ("encoder", "tp=2"),
        ("one layer", "tp=2,pp=2,micro_batches=2"),  # kept in one piece for one MLP: refused
    ],
)
def test_one_processs_losses(name: str, plan: str) -> None:
    for found, expected in testing.run_ranks(trained, plan.count("p=2") * 2, name, plan):
        assert found == pytest.approx(expected, rel=FLOAT64)
