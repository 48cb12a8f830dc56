"""Settings of layers that a script changes between steps of a pipeline: one process's losses."""

from __future__ import annotations

import pytest
from tests.parity.jobs.layer_setting_jobs import trained
from tests.tolerances import FLOAT64

from meshwright import testing


@pytest.mark.parametrize(
    "plan", ["pp=2", "pp=2,micro_batches=2", "tp=2,pp=2"]
)  # other stages know a layer's calls by then
def test_one_processs_losses(plan: str) -> None:
    for found, expected in testing.run_ranks(trained, plan.count("p=2") * 2, plan):
        assert found == pytest.approx(expected, rel=FLOAT64)
