"""An autograd.Function of the user's own over outputs that lie in slices on tensor-parallel ranks: its gradient is not lost."""

from __future__ import annotations

import pytest
from tests.parity.jobs import function_jobs as jobs

from meshwright import testing


@pytest.mark.parametrize("name", sorted(jobs.LOSSES))
@pytest.mark.parametrize(("plan", "num_ranks"), [("tp=2", 2), ("dp=2,tp=2", 4)])
def test_a_function_over_slices_has_one_devices_gradient(plan: str, num_ranks: int, name: str) -> None:
    expected = jobs.losses("single", name)
    for found in testing.run_ranks(jobs.losses, num_ranks, plan, name):
        assert found == pytest.approx(expected, rel=1e-11)
